"""A key that all requests need."""

import hmac
import os
from typing import Any, Final

from starlette.responses import JSONResponse

_OPEN: Final = ("/health", "/delta_weight_sync/status")  # for load balancers, and for `wait`
_CLOSE: Final = {"type": "websocket.close", "code": 1008}


class KeyGuard:
    """ASGI middleware, also for vLLM's option `--middleware`: answers 401 without the key.

    A request has the key as the bearer token in `Authorization`, or in `X-Delta-Weight-Sync-Key`. The key is
    `key`, or by default DELTA_WEIGHT_SYNC_KEY, which must be set.
    """

    def __init__(self, app: Any, key: str = "") -> None:
        self._app = app
        self._key = (key or os.environ["DELTA_WEIGHT_SYNC_KEY"]).encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass an allowed request on."""
        if scope["type"] != "lifespan" and scope["path"] not in _OPEN and not self._allows(scope):
            sentence = "send the server's DELTA_WEIGHT_SYNC_KEY as the API key"
            refused = JSONResponse({"error": {"message": sentence, "type": "refused", "code": 401}}, 401)
            await (refused(scope, receive, send) if scope["type"] == "http" else send(_CLOSE))
            return
        await self._app(scope, receive, send)

    def _allows(self, scope: Any) -> bool:
        headers = dict(scope["headers"])
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        sent = token if kind.lower() == b"bearer" else headers.get(b"x-delta-weight-sync-key", b"")
        return hmac.compare_digest(sent, self._key)
