"""Faults on demand: make the simulated Hub fail, stall, hang up or lie, for chosen requests."""

import asyncio
import re
from collections.abc import Callable
from uuid import uuid4

from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .clock import http_date
from .limits import Limits


class Fault(BaseModel, extra="forbid"):
    """What happens to requests whose "METHOD /path" matches; without a `status` the real answer follows."""

    match: str  # regular expression
    times: int = -1  # how many requests it hits; -1 = all
    status: int = 0  # answer with this status
    headers: dict[str, str] = Field(default_factory=dict)  # of that answer
    delay: float = 0.0  # seconds to wait first
    drop: bool = False  # hang up without an answer
    truncate: int = -1  # hang up after that many bytes of the body
    flip: int = -1  # invert the bits of that byte of the body


class Plan:
    """The faults in force, and every request so far as "METHOD /path"."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.limits = Limits()

    def take(self, request: str) -> Fault | None:
        """The first fault that hits this request; one that has had its times is skipped."""
        for fault in self.faults:
            if fault.times != 0 and re.search(fault.match, request):
                fault.times -= 1
                return fault
        return None


class FaultMiddleware:
    """Outermost layer of the server: applies the plan to each request, and stamps each answer."""

    def __init__(self, app: ASGIApp, plan: Plan, label: Callable[[Scope], str]) -> None:
        self.app, self.plan, self.label = app, plan, label

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = _stamping(send)
        if scope["type"] != "http" or scope["path"].startswith("/_sim"):
            return await self.app(scope, receive, send)
        request = self.label(scope)
        self.plan.requests.append(request)
        if fault := self.plan.take(request):
            return await self._fail(fault, scope, receive, send)
        headers, refused = self.plan.limits.take(scope)
        app = JSONResponse({"error": "Too Many Requests"}, 429) if refused else self.app
        return await app(scope, receive, _with(send, headers))

    async def _fail(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(fault.delay)
        if fault.drop:
            receive.__self__.transport.abort()  # of uvicorn's request; ASGI has no word for hanging up
        elif fault.status:
            await JSONResponse({"error": "injected"}, fault.status, fault.headers)(scope, receive, send)
        else:
            await self.app(scope, receive, _damaging(fault, send))


def _damaging(fault: Fault, send: Send) -> Send:
    """A `send` that damages the body. Bodies here come in one piece."""

    async def damage(message: Message) -> None:
        body = bytearray(message.get("body", b""))
        if 0 <= fault.flip < len(body):
            body[fault.flip] ^= 0xFF
            message = {**message, "body": bytes(body)}
        if 0 <= fault.truncate < len(body):  # uvicorn hangs up on a body that stays incomplete
            message = {**message, "body": bytes(body[: fault.truncate]), "more_body": True}
        await send(message)

    return damage


def _with(send: Send, headers: dict[str, str]) -> Send:
    """A `send` that puts these headers on an answer."""
    more = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *more]
        await send(message)

    return add


def _stamping(send: Send) -> Send:
    """A `send` that puts a date and a number on an answer."""

    async def stamp(message: Message) -> None:
        if message["type"] == "http.response.start":
            more = [(b"date", http_date().encode()), (b"x-request-id", b"Root=1-%s" % uuid4().hex.encode())]
            message["headers"] = [*message.get("headers", ()), *more]
        await send(message)

    return stamp
