"""Checks the key, body and rate of a request, and builds the answers to refused requests."""

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Message, Receive

Headers = Iterable[tuple[bytes, bytes]]
KEY_HEADER = "X-Space-Key"  # leaves Authorization to the Hub, which checks it for private Spaces
_KEY_HEADER = KEY_HEADER.lower().encode()
FRAMING = "frame-ancestors https://huggingface.co"  # only the Hub may show a Space inside its own page
SAFE_HEADERS = [("X-Content-Type-Options", "nosniff")]
CLOSE = {"Connection": "close"}  # for refusals that leave the rest of the body unread
_EXCESS = 8 << 20  # bytes read beyond the limit, because many clients read a refusal only after sending all


class Problem(BaseModel):
    """Why a request was refused, and how to fix it."""

    detail: str


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the statuses with which a route may refuse, for FastAPI's description of the API."""
    return {status: {"model": Problem} for status in statuses}


def problem(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """A refusal as FastAPI writes it: `{"detail": sentence}`."""
    return JSONResponse({"detail": sentence}, status, headers)


def openai_error(refusal: HTTPException, kind: str = "refused") -> JSONResponse:
    """A refusal in the form that OpenAI's clients expect."""
    error = {"message": refusal.detail, "type": kind, "code": refusal.status_code}
    return JSONResponse({"error": error}, refusal.status_code, refusal.headers)


def too_many(sentence: str) -> HTTPException:
    return HTTPException(429, f"{sentence}; try again in a moment", {"Retry-After": "1"})


def has_key(key: str, headers: Headers) -> bool:
    """Whether these headers have `key`. If `key` is empty, the answer is always yes."""
    return not key or hmac.compare_digest(key.encode(), dict(headers).get(_KEY_HEADER, b""))


def no_key(headers: Headers, secret: str) -> HTTPException:
    """The refusal of a request without the key. `secret` names the Space's secret that holds the key."""
    sentence = f"This needs a key: send the Space's {secret} in the header {KEY_HEADER}."
    if dict(headers).get(_KEY_HEADER):
        sentence = f"The key in {KEY_HEADER} is wrong: send the value of this Space's {secret}."
    return HTTPException(401, sentence, CLOSE)


async def read_body(receive: Receive, limit: int, seconds: float) -> bytes:
    """Read the complete body. Raises `HTTPException`: 408 after `seconds`, 413 beyond `limit` bytes."""
    body, size, more = bytearray(), 0, True
    try:
        async with asyncio.timeout(seconds):
            while more and size <= limit + _EXCESS:
                message = await receive()
                size += len(message.get("body", b""))
                body += message.get("body", b"") if size <= limit else b""
                more = message.get("more_body", False)
    except TimeoutError:
        late = f"The request did not arrive within {seconds:g} s. Send it again."
        raise HTTPException(408, late, CLOSE) from None
    if size > limit:
        raise HTTPException(413, f"The body is too large. Send at most {limit} bytes.", CLOSE)
    return bytes(body)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns `body` first, and then the messages of the given `receive`."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


class RateLimit:
    """A budget per client: it grows by `per_second`, and a client can save up at most `burst`."""

    _MAX_CLIENTS = 4096  # beyond this, the client that was charged longest ago is forgotten

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._ahead_s, self._clock = per_second, burst / per_second, clock
        # Client -> the moment at which the growth of its budget will have paid for all its charges.
        self._paid_until: OrderedDict[str, float] = OrderedDict()

    def spend(self, client: str, cost: float) -> float:
        """Charge a client `cost`, which must be at most `burst`, and return 0. If the client cannot pay,
        charge nothing, and return the seconds until the client can pay."""
        now = self._clock()
        until = max(now, self._paid_until.get(client, now)) + cost / self._per_second
        if until > now + self._ahead_s:
            return until - now - self._ahead_s
        self._paid_until[client] = until
        self._paid_until.move_to_end(client)
        if len(self._paid_until) > self._MAX_CLIENTS:
            self._paid_until.popitem(last=False)
        return 0.0
