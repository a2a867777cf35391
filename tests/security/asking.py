"""The gate before an app, and clients of it: a trainer with the key, and visitors from where one wants."""

import functools
from collections.abc import Awaitable, Callable

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inference_space.completions import Completions
from inference_space.dashboard_calls import Calls
from inference_space.gate import Gate
from inference_space.places import Lane
from tests import idle_time

KEY = "correct-horse-battery-staple"
RIGHT = {"X-Space-Key": KEY}
CONTEXT = 1000  # tokens
EVENTS = {0: ["kept"], 3: ["text", "number"]}
LANES = {name: Lane(8, 600.0) for name in ("page", "reading", "inference", "open pages")}
VISITOR, OTHER = "203.0.113.7", "198.51.100.9"


async def echo(request: Request) -> Response:
    """What an app behind the gate gets to see."""
    headers = {name.decode(): value.decode() for name, value in request.headers.raw}
    return JSONResponse({"path": request.scope["path"], "headers": headers})


def gate(app: Callable[[Request], Awaitable[Response]] = echo, **options) -> Gate:
    """The gate before an app that answers every route in the same way."""

    async def answer(request: Request, _: Exception) -> Response:
        return await app(request)

    everything = Starlette(exception_handlers={404: answer})
    readers = {"completion": Completions(lambda: CONTEXT, at_once=8), "event": Calls(EVENTS)}
    return Gate(everything, **{"key": KEY, "lanes": LANES, "readers": readers, **options})


def client(app, address: str = VISITOR, **options) -> httpx.AsyncClient:
    """Somebody at this address."""
    transport = httpx.ASGITransport(app, client=(address, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://replica", **options)


trainer = functools.partial(client, headers=RIGHT)


def running(scenario: Callable[[], Awaitable]):
    """What `scenario` returns; its waiting takes no time, and ends when nothing else can happen."""
    return idle_time.run(scenario())
