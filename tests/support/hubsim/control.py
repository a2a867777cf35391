"""The simulator's own switches under /_sim, and the faults and rate limits that they set."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .accounts import Account, Token
from .buckets import Feed
from .common import CLOCK, http_date
from .jobs import Jobs
from .repos import RepoState, blob
from .spaces import Builds


class Limit(BaseModel, extra="forbid"):
    """How many files a token may request in a window; 0 = no limit."""

    files: int = 0
    window_s: float = 300.0


class Limits:
    """Counts requests for files by token, from whichever machine they come."""

    def __init__(self) -> None:
        self.set(Limit())

    def set(self, limit: Limit) -> None:
        """From now on; the first window begins now."""
        self.limit = limit
        self._started = time.monotonic()
        self._used: Counter[tuple[bytes, int]] = Counter()

    def take(self, scope: Scope) -> tuple[dict[str, str], bool]:
        """Count a request; the headers of its answer, and whether that is a refusal."""
        if not self.limit.files or "/resolve/" not in scope["path"]:
            return {}, False
        window, into = divmod(time.monotonic() - self._started, self.limit.window_s)
        who = dict(scope["headers"]).get(b"authorization", b""), int(window)
        self._used[who] += 1
        left = self.limit.files - self._used[who]
        policy = f'"fixed window";"resolvers";q={self.limit.files};w={self.limit.window_s:.0f}'
        state = f'"resolvers";r={max(left, 0)};t={self.limit.window_s - into:.0f}'
        return {"RateLimit": state, "RateLimit-Policy": policy}, left < 0


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
        self.times: list[tuple[str, str, float, float]] = []  # request, token, start and end
        self.limits = Limits()

    def take(self, request: str) -> Fault | None:
        """The first fault that hits this request; a fault that has been used up is skipped."""
        for fault in self.faults:
            if fault.times != 0 and re.search(fault.match, request):
                fault.times -= 1
                return fault
        return None


class FaultMiddleware:
    """Outermost layer of the server: applies the plan to each request, and stamps each answer."""

    def __init__(self, app: ASGIApp, plan: Plan, label: Callable[[Scope], str]) -> None:
        self.app = app
        self.plan = plan
        self.label = label

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = _with(send, {"Date": http_date(), "X-Request-Id": f"Root=1-{uuid4().hex}"})
        if scope["type"] != "http" or scope["path"].startswith("/_sim"):
            return await self.app(scope, receive, send)
        request = self.label(scope)
        started = time.time()
        self.plan.requests.append(request)
        await self._answer(request, scope, receive, send)
        token = dict(scope["headers"]).get(b"authorization", b"").decode().removeprefix("Bearer ")
        self.plan.times.append((request, token, started, time.time()))
        return None

    async def _answer(self, request: str, scope: Scope, receive: Receive, send: Send) -> None:
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


SPACE = "/spaces/{owner}/{name}"


class SpaceChange(BaseModel, extra="forbid"):
    """What a test changes. The first three count before the Space exists, too."""

    builds: tuple[str, ...] | None = None  # the stages of each later build
    error: str = ""  # message of the stages that end in ERROR, now or in those builds
    host: str | None = None  # URL of the app that the Hub names, instead of the simulator's own port for it
    stage: str | None = None  # enter it immediately
    upstream: str | None = None  # URL of the process that answers for the app while it is RUNNING


class NewModel(BaseModel, extra="forbid"):
    id: str
    gated: str | bool = False
    granted: list[str] = []
    files: dict[str, str] = {}


def control_routes(jobs: Jobs, plan: Plan) -> APIRouter:
    """Routes under /_sim. Faults do not apply to them."""
    hub = jobs.hub
    routes = APIRouter(prefix="/_sim")

    @routes.post("/faults")
    async def add(fault: Fault) -> None:
        plan.faults.append(fault)

    @routes.delete("/faults")
    async def clear() -> None:
        plan.faults.clear()
        CLOCK.skew = 0.0

    @routes.put("/limit")
    async def set_limit(limit: Limit) -> None:
        plan.limits.set(limit)

    @routes.get("/requests")
    async def requests() -> list[str]:
        return plan.requests

    @routes.get("/times")
    async def times() -> list[tuple[str, str, float, float]]:
        return plan.times

    @routes.get("/received")
    async def received() -> int:
        return hub.cas.received

    @routes.put("/clock/{skew}")
    async def set_clock(skew: float) -> None:
        CLOCK.skew = skew

    @routes.put("/accounts/{name}")
    async def add_account(name: str, how: dict[str, Any]) -> None:
        hub.accounts.add(Account(name, **how))

    @routes.put("/tokens/{token}")
    async def add_token(token: str, how: dict[str, Any]) -> None:
        hub.accounts.tokens[token] = Token(**how)

    @routes.post("/models")
    async def add_model(model: NewModel) -> None:
        repo = RepoState("models", model.id, gated=model.gated, granted=set(model.granted))
        added = {path: blob(text.encode()) for path, text in model.files.items()}
        repo.commit("add files", {**repo.files, **added})
        hub.repos["models", model.id] = repo

    @routes.get(SPACE)
    async def see(owner: str, name: str) -> dict[str, Any]:
        space = hub.spaces[f"{owner}/{name}"]
        files = {path: file.content.decode(errors="replace") for path, file in space.repo.files.items()}
        return {
            **{key: value for key, value in vars(space).items() if key != "repo"},
            "variables": {key: one.value for key, one in space.variables.items()},
            "secrets": {key: one.value for key, one in space.secrets.items()},
            "commits": [commit.title for commit in space.repo.commits],
            "files": files,
            "visibility": space.repo.visibility,
        }

    @routes.patch(SPACE)
    async def change(owner: str, name: str, wish: SpaceChange) -> None:
        name = f"{owner}/{name}"
        if wish.builds is not None:
            hub.builds[name] = Builds(wish.builds, wish.error)
        if wish.host is not None:
            hub.hosts[name] = wish.host
        if space := hub.spaces.get(name):
            space.builds = hub.builds.get(name, space.builds)
            space.host = hub.hosts.get(name, space.host)
            space.upstream = wish.upstream or space.upstream
            if wish.stage is not None:
                space.enter(wish.stage, error=wish.error)

    @routes.post(SPACE + "/logs/{kind}")
    async def log(owner: str, name: str, kind: str, line: str) -> None:
        hub.spaces[f"{owner}/{name}"].log(kind, line)

    @routes.get("/jobs")
    async def see_jobs() -> list[dict[str, Any]]:
        return [{**job.to_json(), "secrets": job.spec.get("secrets", {})} for job in jobs.all.values()]

    @routes.get("/ports")
    async def see_ports() -> dict[str, str]:
        return jobs.environ

    @routes.post("/jobs/{name}/end")
    async def end_job(name: str, message: str, number: int) -> None:
        jobs.all[name].end("ERROR", message, number=number)

    @routes.put("/jobs/exposes/{exposes}")
    async def set_exposes(exposes: bool) -> None:
        jobs.exposes = exposes

    @routes.put("/feed")
    async def set_feed(rules: Feed) -> None:
        vars(hub.feed).update(rules)

    @routes.delete("/feed/{owner}/{name}")
    async def end_feeds(owner: str, name: str, politely: bool) -> None:
        hub.buckets[f"{owner}/{name}"].end_feeds(politely=politely)

    return routes
