"""Who may ask for what: looking and the page's own games are open, the API wants the key of the Space.

The page's games have a store of their own, with few places, so nothing that visitors do takes a place from a
trainer.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Iterable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

Headers = Iterable[tuple[bytes, bytes]]

HEADER = "X-Space-Key"
AT_ONCE, EACH = 64, 8  # games of visitors: together, and of one address
# Everything else needs the key: a route that is added is closed until it stands here.
OPEN = re.compile(
    r"/|/(health|words|metrics|schema|metadata|watch|mcp)|/(docs|redoc|openapi\.json)|/(page|play)(/.*)?"
)
MISSING = f"This needs the Space's key; send its WORDLE_KEY in the header {HEADER} (trainers: set SPACE_KEY)."
WRONG = f"The key in {HEADER} is not this Space's; compare it with its WORDLE_KEY."


class KeyCheck:
    """ASGI middleware. Without a `key` everything is open: for a machine that nobody else reaches."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with a sentence."""
        if scope["type"] == "lifespan" or OPEN.fullmatch(scope["path"]):
            return await self._app(scope, receive, send)
        if opens(self._key, scope["headers"]):
            return await self._app(scope, receive, send)
        refusal = JSONResponse({"detail": WRONG if _given(scope["headers"]) else MISSING}, 401)
        if scope["type"] == "websocket":
            return await WebSocket(scope, receive, send).send_denial_response(refusal)
        return await refusal(scope, receive, send)


def opens(key: bytes, headers: Headers) -> bool:
    """Whether a request with these headers shows `key`; every one does where there is none."""
    return not key or hmac.compare_digest(key, _given(headers))


def _given(headers: Headers) -> bytes:
    return dict(headers).get(HEADER.lower().encode(), b"")


def replica_headers(url: str, key: str) -> dict[str, str]:
    """What requests to the replica at `url` carry: its key, and to a Space of this Space's owner a token."""
    token = os.environ.get("HF_TOKEN", "") if _same_owner(url) else ""
    headers = {HEADER: key, "Authorization": token and f"Bearer {token}"}
    return {name: value for name, value in headers.items() if value}


def _same_owner(url: str) -> bool:
    owner = os.environ.get("SPACE_ID", "").partition("/")[0].replace("_", "-")  # as in the names of hosts
    space = rf"https://{re.escape(owner)}-[a-z0-9-]+\.hf\.space(:443)?(/.*)?"
    return bool(owner and re.fullmatch(space, url, re.IGNORECASE))
