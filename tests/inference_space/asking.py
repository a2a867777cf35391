"""The public port in front of an app that stands for vLLM and the dashboard, and its clients."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inference_space.completions import Completions, Inference
from inference_space.public_port import add_guard
from tests import idle_time

KEY = "correct-horse-battery-staple"
RIGHT = {"X-Space-Key": KEY}
CONTEXT = 1000  # tokens


async def echo(request: Request) -> Response:
    """What an app behind the guard gets to see."""
    headers = {name.decode(): value.decode() for name, value in request.headers.raw}
    body = (await request.body()).decode()
    return JSONResponse({"path": request.scope["path"], "body": body, "headers": headers})


def guarded(
    app: Callable[[Request], Awaitable[Response]] = echo, *, key: str = KEY, capacity: int = 8, whole=None
) -> Starlette:
    """The public port before the `whole` app, or before one that answers every route in the same way."""

    async def answer(request: Request, _: Exception) -> Response:
        return await app(request)

    vllm = SimpleNamespace(app=Starlette(exception_handlers={404: answer}), alive=lambda: True)
    port = whole or Starlette(exception_handlers={404: answer})
    completions = Completions(lambda: CONTEXT, batch=8)
    port.add_middleware(
        Inference,
        vllm=vllm,
        unready=lambda: None,
        completions=completions,
        capacity=capacity,
        seconds=600.0,
    )
    add_guard(port, key)
    return port


def client(app, **options) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica", **options)


async def ask_raw(app, path: str, *received, method: str = "POST", headers=()) -> list:
    """The messages of the answer to a request of which `received` arrives, and then nothing more."""
    arriving = iter(received)
    sent = []

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
