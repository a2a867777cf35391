"""`python -m tests.hubsim ROOT`: serve on a free loopback port, print the port, stop when stdin closes."""

import os
import socket
import sys
import threading
from pathlib import Path

import uvicorn

from .server import build


def main() -> None:
    """Serve until the process that started this one lets go of stdin, or dies."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build(Path(sys.argv[1])), log_level="critical", lifespan="off"))
    threading.Thread(target=lambda: os._exit(0) if not sys.stdin.read() else None, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
