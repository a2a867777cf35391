"""`python -m tests.hubsim ROOT`: serve on free loopback ports, print the Hub's, stop when stdin closes."""

import os
import socket
import sys
import threading
from pathlib import Path

import uvicorn

from .server import build

SPACES = 12  # how many there can be at a time


def main() -> None:
    """Serve until the process that started this one lets go of stdin, or dies."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + SPACES)]
    port, *doors = [listener.getsockname()[1] for listener in listeners]
    app = build(Path(sys.argv[1]), [f"http://127.0.0.1:{door}" for door in doors])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", date_header=False))
    threading.Thread(target=lambda: os._exit(0) if not sys.stdin.read() else None, daemon=True).start()
    print(port, flush=True)
    server.run(sockets=listeners)


if __name__ == "__main__":
    main()
