"""The gate of the public port: what is listed here passes, with its key and within its limits; nothing else.

It stands before every app of the Space, so a route that some library adds is closed until it is listed. A
path is compared as it was sent, before anything decodes it. Each refusal is a sentence that names the fix, in
the form in which OpenAI's clients expect errors.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_space.headers import passed_on, with_headers
from inference_space.places import Client, Lane, Pace, Places
from inference_space.refused import Refused
from inference_space.whole import Reader, Whole

KEY_HEADER = b"x-space-key"
BODY_S = 60.0  # seconds in which a request's body must have come
ARRIVING = Lane(64 << 20, BODY_S)  # places are bytes of bodies that have not come whole
# An address may spend so much a second; the costs of the routes are about their milliseconds.
PACE = (200.0, 2000.0)
KEYED = "keyed"  # in a request's state: it came with the key


@dataclass(frozen=True)
class Route:
    """What may be asked. `path` is a regular expression for the whole path, `body` names who reads it."""

    path: str
    method: str = "GET"
    lane: str = "page"
    keyed: bool = False
    body: str | None = None
    cost: float = 1.0


_FILE = r"(/[\w-][\w.-]*)+"  # no part of it begins with a dot
ROUTES = (
    Route("/", cost=2.0),
    Route("/", "HEAD", cost=2.0),
    Route("/(health|ready)", lane=""),  # without limit: the platform and trainers go by them
    Route("/status"),
    Route("/v1/models", lane="reading"),
    Route("/v1/(chat/)?completions", "POST", lane="inference", keyed=True, body="completion", cost=10.0),
    # It says "look at the bucket now" and nothing else. Too many do no harm, but all replicas of a user share
    # one quota of requests, and trainers have the key.
    Route("/delta_weight_sync/poke", "POST", keyed=True),
    Route("/dashboard/(frame|inside|bucket|delta|verify|explain|object)", lane="reading", cost=5.0),
    # Of Gradio's routes those without which the page does not work. An event carries plain values only; those
    # of the owner's tab are refused behind it to whoever neither gives the key nor is logged in as the owner.
    Route(f"/(assets|static){_FILE}"),
    Route(r"/(theme\.css|favicon\.ico)"),
    Route(r"/gradio_api/heartbeat/\w{1,40}", lane="open pages"),
    Route("/gradio_api/run/predict", "POST", body="event", cost=10.0),
    Route("/login/(huggingface|callback)"),
    Route("/logout"),
)


class Gate:
    """ASGI middleware. Without a `key` keyed routes are open: for a machine that nobody else reaches."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str,
        lanes: Mapping[str, Lane],
        readers: Mapping[str, Reader],
        open_inference: bool = False,
        pace: Pace | None = None,
    ) -> None:
        """`open_inference`: visitors may use keyed routes, too, and still cannot take a trainer's place."""
        self._app, self._key, self._open = app, key.encode(), open_inference
        self._places = Places({"arriving": ARRIVING, **lanes})
        self._readers, self._pace = readers, pace or Pace(*PACE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        answer = _Answer(with_headers(send))
        try:
            await self._pass(scope, receive, answer)
        except Refused as refusal:
            if not answer.begun:
                await refusal.answer(scope, receive, answer)
        return None

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = find(scope)
        client = self._who(scope, route)
        self._pace.spend(client, route.cost)
        whole = await self._read(scope, receive, route, client)
        with self._places.taken(route.lane, client, whole.places):
            async with _deadline(self._places.lane(route.lane)):
                inside = {**scope, "headers": passed_on(scope["headers"])}
                await self._app(inside, _again(whole.body, receive), send)

    def _who(self, scope: Scope, route: Route) -> Client:
        """Who asks; raises `Refused` for who would need the key."""
        given = dict(scope["headers"]).get(KEY_HEADER, b"")
        if not self._key or (given and hmac.compare_digest(self._key, given)):
            scope.setdefault("state", {})[KEYED] = True
            return None
        if route.keyed and not self._open:
            raise Refused(401, _WRONG if given else _MISSING)
        return _network(scope)

    async def _read(self, scope: Scope, receive: Receive, route: Route, client: Client) -> Whole:
        """The whole body, as it may be passed on."""
        announced = _announced(scope)
        if route.body is None:
            if announced != 0:
                raise Refused(413, "the body is too large: this route takes none", _CLOSE)
            return Whole()
        # A page of another site cannot send this type without asking first, and is told no.
        if not dict(scope["headers"]).get(b"content-type", b"").startswith(b"application/json"):
            raise Refused(415, "the body must be JSON: send it with Content-Type: application/json", _CLOSE)
        reader = self._readers[route.body]
        with self._places.taken("arriving", client, min(reader.limit, announced or reader.limit)):
            body = await _arrived(receive, reader.limit)
        try:
            return reader.read(body)
        except ValueError as error:
            raise Refused(422, str(error)) from None


_MISSING = "this needs the Space's key: send its REPLICA_KEY in the header X-Space-Key"
_WRONG = "the key in X-Space-Key is not this Space's: compare it with its REPLICA_KEY"
_CLOSE = {"Connection": "close"}  # the rest of the body is not waited for


def find(scope: Scope) -> Route:
    """The route that a request asks for; raises `Refused` where it is not listed."""
    path = scope["raw_path"].decode("latin-1")
    known = {route.method: route for route in ROUTES if re.fullmatch(route.path, path, re.ASCII)}
    if not known:
        raise Refused(404, "there is no such route on this Space; its README lists those that there are")
    if scope["method"] not in known:
        raise Refused(405, f"this route takes {' and '.join(known)} only", {"Allow": ", ".join(known)})
    return known[scope["method"]]


def _network(scope: Scope) -> str:
    """Whose address it is: one of IPv4, or the 2^64 of IPv6 that one connection is given."""
    host = (scope.get("client") or ("", 0))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return host if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))


def _announced(scope: Scope) -> int | None:
    """How many bytes of a body are to come; None if that is not said."""
    headers = dict(scope["headers"])
    return None if b"transfer-encoding" in headers else int(headers.get(b"content-length", b"0"))


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


async def _arrived(receive: Receive, most: int) -> bytes:
    """The whole body; what comes of one that is too large is heard for a while, and not kept."""
    body, size, more = bytearray(), 0, True
    try:
        async with asyncio.timeout(BODY_S):
            while more and size <= most + _HEARD:
                message = await receive()
                size += len(message.get("body", b""))
                body += message.get("body", b"") if size <= most else b""
                more = message.get("more_body", False)
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_S:.0f} s; send it again", _CLOSE) from None
    if size > most:
        raise Refused(413, f"the body is too large: at most {most} bytes may be sent here", _CLOSE)
    return bytes(body)


_HEARD = 8 << 20  # bytes: who is still sending when the answer comes may not see it


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
