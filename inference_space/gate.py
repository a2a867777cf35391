"""The gate of the public port: what is listed here passes, with its key and within its limits; nothing else.

It stands before every app of the Space, so a route that some library adds is closed until it is listed. A
path is compared as it was sent, before anything decodes it. Each refusal is a sentence that names the fix, in
the form in which OpenAI's clients expect errors.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_space.dashboard_calls import plain_call

KEY_HEADER = b"x-space-key"
BODY_S = 60.0  # seconds in which a request's body must have come
# No app behind the gate needs the first two. The third would make Gradio let any site read its answers.
_KEPT_HERE = (KEY_HEADER, b"authorization", b"origin")


@dataclass(frozen=True)
class Lane:
    """Requests that share limits: so many at once, each for at most so many seconds."""

    at_once: int
    seconds: float


@dataclass(frozen=True)
class Route:
    """What may be asked. `path` is a regular expression for the whole path, `body` a number of bytes."""

    path: str
    method: str = "GET"
    lane: str = "open"
    keyed: bool = False
    body: int = 0
    reads: Callable[[bytes], bytes] = bytes  # the body that is passed on; raises ValueError to refuse it


_FILE = r"(/[\w-][\w.-]*)+"  # no part of it begins with a dot
ROUTES = (
    Route("/"),
    Route("/", "HEAD"),
    Route("/(health|ready|status)"),
    Route("/v1/models", lane="reading"),
    Route("/v1/(chat/)?completions", "POST", lane="inference", keyed=True, body=8 << 20),
    # It says "look at the bucket now" and nothing else. Too many do no harm, but all replicas of a user share
    # one quota of requests, and trainers have the key.
    Route("/delta_weight_sync/poke", "POST", keyed=True),
    Route("/dashboard/(frame|inside|bucket|delta|verify|explain|object)", lane="reading"),
    # Of Gradio's routes those without which the page does not work. An event carries plain values only; those
    # of the owner's tab are refused behind it to whoever neither gives the key nor is logged in as the owner.
    Route(f"/(assets|static){_FILE}"),
    Route(r"/(theme\.css|favicon\.ico)"),
    Route(r"/gradio_api/heartbeat/\w{1,40}"),
    Route("/gradio_api/run/predict", "POST", body=16 << 10, reads=plain_call),
    Route("/login/(huggingface|callback)"),
    Route("/logout"),
)


class Refused(Exception):  # noqa: N818 - it is an answer, not a fault
    """The request gets this answer and goes no further."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        error = {"message": sentence, "type": "refused", "code": status}
        self.answer = JSONResponse({"error": error}, status, headers)


class Gate:
    """ASGI middleware. Without a `key` keyed routes are open: for a machine that nobody else reaches."""

    def __init__(self, app: ASGIApp, *, key: str, inference: Lane, reading: Lane) -> None:
        self._app, self._key = app, key.encode()
        self._lanes = {"inference": inference, "reading": reading}
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        answer = _Answer(send)
        try:
            await self._pass(scope, receive, answer)
        except Refused as refusal:
            if not answer.begun:
                await refusal.answer(scope, receive, send)
        return None

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = find(scope)
        if route.keyed and self._key:
            check_key(self._key, dict(scope["headers"]).get(KEY_HEADER, b""))
        with self._place(route):
            async with _deadline(self._lanes.get(route.lane)):
                body = await _read(receive, scope, route)
                headers = [pair for pair in scope["headers"] if pair[0] not in _KEPT_HERE]
                await self._app({**scope, "headers": headers}, _again(body, receive), send)

    @contextmanager
    def _place(self, route: Route) -> Iterator[None]:
        lane = self._lanes.get(route.lane)
        if lane and self._running[route.lane] >= lane.at_once:
            sentence = f"{lane.at_once} requests of this kind are being answered; try again in a moment"
            raise Refused(429, sentence, {"Retry-After": "1"})
        self._running[route.lane] += 1
        try:
            yield
        finally:
            self._running[route.lane] -= 1


def find(scope: Scope) -> Route:
    """The route that a request asks for; raises `Refused` where it is not listed."""
    path = scope["raw_path"].decode("latin-1")
    known = {route.method: route for route in ROUTES if re.fullmatch(route.path, path, re.ASCII)}
    if not known:
        raise Refused(404, "there is no such route on this Space; its README lists those that there are")
    if scope["method"] not in known:
        raise Refused(405, f"this route takes {' and '.join(known)} only", {"Allow": ", ".join(known)})
    return known[scope["method"]]


def check_key(key: bytes, given: bytes) -> None:
    """Compare in constant time; raises `Refused` with what to do."""
    if not given:
        raise Refused(401, "this needs the Space's key: send its REPLICA_KEY in the header X-Space-Key")
    if not hmac.compare_digest(key, given):
        raise Refused(401, "the key in X-Space-Key is not this Space's: compare it with its REPLICA_KEY")


class _Answer:
    """Passes an answer on, and knows whether it has begun."""

    def __init__(self, send: Send) -> None:
        self._send, self.begun = send, False

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self._send(message)


@asynccontextmanager
async def _deadline(lane: Lane | None) -> AsyncIterator[None]:
    """End the block, and what is being waited for in it, when its time is up."""
    try:
        async with asyncio.timeout(lane.seconds if lane else None) as clock:
            yield
    except TimeoutError:
        if not clock.expired():
            raise
        raise Refused(504, "the answer took longer than this Space allows: ask for fewer tokens") from None


async def _read(receive: Receive, scope: Scope, route: Route) -> bytes:
    """The whole body, as it may be passed on."""
    # A page of another site cannot send this type without asking first, and is told no.
    kind = dict(scope["headers"]).get(b"content-type", b"")
    if route.body and not kind.startswith(b"application/json"):
        raise Refused(415, "the body must be JSON: send it with Content-Type: application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            more = True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > route.body:
                    raise Refused(413, f"the body is too large: at most {route.body} bytes may be sent here")
        return route.reads(bytes(body))
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_S:.0f} s; send it again") from None
    except ValueError as error:
        raise Refused(422, str(error)) from None


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once more, then whatever comes after it."""
    read = False

    async def again() -> Message:
        nonlocal read
        if read:
            return await receive()
        read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
