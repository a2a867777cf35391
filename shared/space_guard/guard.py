"""What a Space checks before its app sees a request: the route, the key, and the size and time of the body.

Connections and heads of requests are left to uvicorn (see `space_guard.serving`), and to the proxy in front.
"""

import asyncio
import hmac
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Headers = Iterable[tuple[bytes, bytes]]
KEY_HEADER = "X-Space-Key"  # leaves Authorization to the Hub, which checks it for private Spaces
_KEY_HEADER = KEY_HEADER.lower().encode()
FRAMING = "frame-ancestors https://huggingface.co"  # only the Hub may show a Space inside its own page
SAFE_HEADERS = [("X-Content-Type-Options", "nosniff")]
BODY_S = 60.0  # seconds within which a request's body must arrive
KEYLESS_PER_S = 200  # requests without the key, of all clients together; a page needs up to 60
_BURST = 200  # of these requests, after a quiet time
_TURN_S = 10.0  # the longest wait for a turn
# Platforms ask these paths, and restart a Space that answers late.
_PROBES = (b"/health", b"/ready")
_CLOSE = {"Connection": "close"}  # for refusals that leave the rest of the body unread


@dataclass(frozen=True)
class Route:
    """A route that the guard passes. `path` is a regular expression for the whole path."""

    path: str
    method: str | None = "GET"  # None: every method, and WebSockets
    keyed: bool = False
    max_body: int = 0  # bytes


class _Turns:
    """Spaces out the requests without the key: a flood of them leaves time for clients that have it."""

    def __init__(self) -> None:
        self._last = -math.inf

    async def wait(self) -> None:
        """Wait for a turn. Raises `HTTPException` 503 if the next one is too far away."""
        now = asyncio.get_running_loop().time()
        turn = max(self._last + 1 / KEYLESS_PER_S, now - _BURST / KEYLESS_PER_S)
        if turn > now + _TURN_S:
            busy = "Too many requests without a key are waiting. Try again in a few seconds."
            raise HTTPException(503, busy, _CLOSE | {"Retry-After": f"{_TURN_S:.0f}"})
        self._last = turn
        if turn > now:
            await asyncio.sleep(turn - now)


@dataclass
class Guard:
    """ASGI middleware: passes the listed requests to `app`, with a complete body, and refuses all others.

    Requests without the key wait for their turn if there are more than `KEYLESS_PER_S`.

    The first route whose path and method match decides. The guard compares each path as the client sent it,
    before anything decodes it.
    """

    app: ASGIApp
    _: KW_ONLY
    routes: Sequence[Route]
    key: str  # opens the keyed routes; if it is empty, every client may use them
    secret: str  # the name of the Space's secret that holds the key, for refusals
    refuse: Callable[
        [HTTPException], Response
    ]  # writes a refusal in the form that the Space's clients expect
    _turns: _Turns = field(default_factory=_Turns, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        known = has_key(self.key, headers)
        try:
            if not known and scope["raw_path"] not in _PROBES:
                await self._turns.wait()
            route = find_route(self.routes, scope)
            if route.keyed and not known:
                raise _no_key(headers, self.secret)
            if scope["type"] == "http":
                if headers.get(b"upgrade", b"").lower() == b"websocket":
                    raise HTTPException(400, "This route has no WebSocket. Send a plain request.", _CLOSE)
                receive = replay(await read_body(receive, route.max_body), receive)
        except HTTPException as refusal:
            return await self.refuse(refusal)(scope, receive, send)
        except ClientDisconnect:
            return None
        return await self.app(scope, receive, send)


def find_route(routes: Sequence[Route], scope: Scope) -> Route:
    """The route of a request. Raises `HTTPException` if no listed route matches."""
    path = scope["raw_path"].decode("latin-1")
    known = [route for route in routes if re.fullmatch(route.path, path, re.ASCII)]
    if not known:
        raise HTTPException(404, "This Space has no such route; its README lists the routes.")
    for route in known:
        if route.method in (None, scope.get("method")):
            return route
    methods = [str(route.method) for route in known]
    sentence = f"This route takes {' and '.join(methods)} only."
    raise HTTPException(405, sentence, {"Allow": ", ".join(methods)})


def has_key(key: str, headers: dict[bytes, bytes]) -> bool:
    """Whether these headers have `key`. If `key` is empty, the answer is always yes."""
    return not key or hmac.compare_digest(key.encode(), headers.get(_KEY_HEADER, b""))


def _no_key(headers: dict[bytes, bytes], secret: str) -> HTTPException:
    sentence = f"This needs a key: send the Space's {secret} in the header {KEY_HEADER}."
    if headers.get(_KEY_HEADER):
        sentence = f"The key in {KEY_HEADER} is wrong: send the value of this Space's {secret}."
    return HTTPException(401, sentence, _CLOSE)


async def read_body(receive: Receive, limit: int) -> bytes:
    """Read the complete body. Raises `HTTPException`: 408 after `BODY_S`, 413 beyond `limit` bytes; and
    `ClientDisconnect` if the client leaves before."""
    body = bytearray()
    more = True
    try:
        async with asyncio.timeout(BODY_S):
            while more and len(body) <= limit:
                message = await receive()
                if message["type"] == "http.disconnect":  # the client left before its body was complete
                    raise ClientDisconnect
                body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        late = f"The body did not arrive within {BODY_S:g} s. Send the request again."
        raise HTTPException(408, late, _CLOSE) from None
    if len(body) > limit:
        raise HTTPException(413, f"The body is too large. Send at most {limit} bytes.", _CLOSE)
    return bytes(body)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns `body` first, and then the messages of the given `receive`."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again
