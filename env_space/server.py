"""The web server: uvicorn with the limits and headers that hold for every request."""

import resource
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from env_space.clients import PROXIES
from env_space.connections import Connection, Strangers

MAX_BODY_BYTES = 16 * 1024
STRANGERS = 1024  # connections without the key; as many games as there may be can begin at once all the same
KEEP_ALIVE_S = 120  # a policy thinks for seconds between two moves on one connection
STOP_WITHIN_S = 10
# A client may be busy with a training step for minutes. Games expire by themselves; this only frees sockets.
PING_EVERY_S, PING_PATIENCE_S = 30, 300
_SPARE_FILES = 64  # besides connections: the log, the loop's own, the replica that is watched
HEADERS = [
    ("Content-Security-Policy", "frame-ancestors https://huggingface.co"),  # where the Hub shows a Space
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
]


def serve(app: ASGIApp, host: str, port: int, key: str = "", games: int = 0) -> None:
    """Serve until SIGTERM; see `options`."""
    uvicorn.run(app, host=host, port=port, **options(key, games))


def options(key: str = "", games: int = 0) -> dict[str, Any]:
    """uvicorn's options. Connections on which `key` was not shown leave room for two of each of `games`."""
    strangers = max(STRANGERS, games)
    wanted = strangers + 2 * games
    connections = _files_for(wanted)
    strangers = strangers * connections // wanted
    return {
        "http": partial(Connection, strangers=Strangers(strangers), key=key.encode()),
        "limit_concurrency": connections,
        "backlog": strangers // 2,  # who is accepted is heard before so many others are that it is cut off
        "forwarded_allow_ips": PROXIES,
        "headers": HEADERS,
        "access_log": False,
        "log_config": None,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": STOP_WITHIN_S,
        "ws_max_size": MAX_BODY_BYTES,
        "ws_per_message_deflate": False,
        "ws_ping_interval": PING_EVERY_S,
        "ws_ping_timeout": PING_PATIENCE_S,
    }


def _files_for(connections: int) -> int:
    """Let this process have so many connections, or as many as it may; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = connections + _SPARE_FILES
    allowed = wanted if hard == unlimited else min(wanted, hard)
    if soft != unlimited and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed - _SPARE_FILES
