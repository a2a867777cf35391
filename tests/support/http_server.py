"""An HTTP server on loopback whose answers a function of the test gives."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import NamedTuple


class Request(NamedTuple):
    """What was asked; the names of headers are lower-case."""

    path: str
    headers: dict[str, str]
    body: bytes


@contextmanager
def answering(
    answer: Callable[[Request], tuple[int, dict[str, str], bytes]], tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Its URL; `answer` gives status, headers and content. If it raises, the server hangs up."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0)))
            status, more, content = answer(Request(self.path, headers, body))
            self.send_response(status)
            for name, value in (more | {"content-length": str(len(content))}).items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # the client may have gone
                self.end_headers()
                self.wfile.write(content)

        do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - the names that http.server looks for

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = tls.wrap_socket(server.socket, server_side=True) if tls else server.socket
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"  # begins a long body


@contextmanager
def dripping(start: bytes) -> Iterator[str]:
    """The URL of a server whose answers begin like this and then come byte by byte, until the client goes."""

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            with suppress(ConnectionError):
                self.request.sendall(start)
                while not ended.wait(0.01):
                    self.request.sendall(b" ")

    ended = threading.Event()
    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01]).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            ended.set()
            server.shutdown()
