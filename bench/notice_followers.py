"""Followers without vLLM, for `bench.notice`: `python -m bench.notice_followers COUNT RUN`.

Prints its port. `POST /<n>/delta_weight_sync/poke` pokes the follower n, `GET /` says of each one when it
began to look and found each version (unix seconds). It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.reader import open_run
from delta_weight_sync.records import POLL_S, Manifest
from delta_weight_sync.watch import Watcher


class Following(threading.Thread):
    """Does what a replica does until it knows a version."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.watcher, self.known = Watcher(open_run(url)), dict[int, tuple[float, float]]()

    def run(self) -> None:
        """For ever."""
        while True:
            with contextlib.suppress(DeltaWeightSyncError):
                began = time.time()
                self.watcher.check(functools.partial(self._know, began))
            self.watcher.wait(POLL_S)

    def _know(self, began: float, manifest: Manifest) -> None:
        self.known.setdefault(manifest.version, (began, time.time()))


def main(count: int, url: str) -> None:
    """Follow until nobody wants to know any more."""
    followers = [Following(url) for _ in range(count)]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # whoever pokes keeps its connection

        def do_POST(self) -> None:
            followers[int(self.path.split("/")[1])].watcher.poke()
            self._say(b"")

        def do_GET(self) -> None:
            self._say(json.dumps([follower.known for follower in followers]).encode())

        def _say(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    for place, follower in enumerate(followers):
        time.sleep(POLL_S / count if place else 0.0)  # nor do replicas look all at one moment
        follower.start()
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
