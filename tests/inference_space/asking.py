"""The gate in front of an app, and its clients: a trainer with the key, and visitors from any address."""

import asyncio
import functools
from collections.abc import Awaitable, Callable

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inference_space.gate import Completions, DashboardCalls, Gate
from space_guard.limits import Lane
from tests import idle_time

KEY = "correct-horse-battery-staple"
RIGHT = {"X-Space-Key": KEY}
CONTEXT = 1000  # tokens
EVENTS = {0: 1, 3: 3}
LANES = "page", "reading", "inference", "open pages"
VISITOR, OTHER = "203.0.113.7", "198.51.100.9"


async def echo(request: Request) -> Response:
    """What an app behind the gate gets to see."""
    headers = {name.decode(): value.decode() for name, value in request.headers.raw}
    body = (await request.body()).decode()
    return JSONResponse({"path": request.scope["path"], "body": body, "headers": headers})


def gate(app: Callable[[Request], Awaitable[Response]] = echo, *, whole=None, **options) -> Gate:
    """The gate before the `whole` app, or before one that answers every route in the same way."""

    async def answer(request: Request, _: Exception) -> Response:
        return await app(request)

    everything = whole or Starlette(exception_handlers={404: answer})
    readers = {"completion": Completions(lambda: CONTEXT, batch=8), "event": DashboardCalls(EVENTS)}
    lanes = {name: Lane(8, 600.0) for name in LANES}
    return Gate(everything, **{"key": KEY, "lanes": lanes, "readers": readers, **options})


def client(app, address: str = VISITOR, **options) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=(address, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://replica", **options)


async def ask_raw(app, path: str, *received, method: str = "POST", headers=()) -> list:
    """The messages of the answer to a request of which `received` arrives, and then nothing more."""
    arriving, sent = iter(received), []

    async def receive():
        return next(arriving, None) or await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    pairs = [(name.lower().encode(), value.encode()) for name, value in dict(headers).items()]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": pairs}
    await app({**scope, "query_string": b""}, receive, send)
    return sent


trainer = functools.partial(client, headers=RIGHT)


def running(scenario: Callable[[], Awaitable]):
    """What `scenario` returns; its waiting takes no time, and ends when nothing else can happen."""
    return idle_time.run(scenario())
