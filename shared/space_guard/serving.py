"""Serves a Space's app with uvicorn, until a signal ends the process."""

import atexit
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

STOP_S = 20  # seconds after a signal in which uvicorn must stop
_CLEAN_S = 5  # further seconds to remove temporary files, if uvicorn did not stop
CONNECTIONS = 8192  # open at the same time
_SPARE_FILES = 64  # open files that are not connections of clients: log, event loop, bucket


class _Server(uvicorn.Server):
    """uvicorn, in a process that ends after a signal even if one of its threads never ends."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        def end() -> None:
            signal.alarm(_CLEAN_S)  # after this time, the kernel ends the process, whatever Python does
            atexit._run_exitfuncs()
            os._exit(128 + sig)

        if not self.should_exit:
            timer = threading.Timer(STOP_S, end)
            timer.daemon = True
            timer.start()
        super().handle_exit(sig, frame)


class _Connection(H11Protocol):
    """Closes connections beyond the limit: uvicorn itself would keep them open and answer their requests with
    503, until no file can be opened. h11 also refuses a head of more than 64 KB; httptools has no limit."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > (self.limit_concurrency or 0):
            transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that break HTTP; if the request has its answer, or is getting it, only close.

        uvicorn would answer in any case, and let the request's app answer, too; h11 refuses the second
        answer, and each such request would put a traceback into the log.
        """
        if self.cycle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()


def serve(
    app: ASGIApp,
    sockets: list[socket.socket] | None = None,
    *,
    connections: int = CONNECTIONS,
    **options: Any,
) -> None:
    """Serve `app` with uvicorn's `options` until SIGTERM or SIGINT; then the process ends within 30 s.

    If `connections` are open, further ones are closed. The system's limit of files may lower this number.
    """
    config = uvicorn.Config(
        app,
        http=_Connection,
        limit_concurrency=_open_files(connections + _SPARE_FILES) - _SPARE_FILES,
        timeout_keep_alive=120,  # between two requests on one connection, a rollout may wait for seconds
        **{"access_log": False, **options},
    )
    server = _Server(config)

    def leave(number: int, frame: Any) -> None:
        server.handle_exit(number, frame)  # stops uvicorn even if some code swallows the `SystemExit`
        sys.exit(128 + number)  # in the ordinary way, which removes temporary folders

    # After uvicorn has stopped, it restores this handler and raises SIGTERM again.
    signal.signal(signal.SIGTERM, leave)
    with suppress(KeyboardInterrupt):
        server.run(sockets)
    if not server.started:
        sys.exit(1)


def _open_files(wanted: int) -> int:
    """Let this process open `wanted` files, or fewer if the system's limit is lower. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # on Linux, neither is RLIM_INFINITY
    allowed = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    return allowed
