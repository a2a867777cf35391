"""The only public port of a vLLM Space: inference, status and the dashboard.

vLLM's app runs in the same process. Of its routes, only the three for inference are open, through the gate.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from delta_weight_sync.reader import RunReader
from delta_weight_sync.runlog import ReplicaEvent, ReplicaReport
from delta_weight_sync.store import open_bucket
from delta_weight_sync.vllm.follower import Follower
from inference_space.dashboard.page import mount
from inference_space.gate import Completions, DashboardCalls, Gate
from inference_space.settings import SETUP, Settings, access_problems
from inference_space.vllm_server import VllmServer
from space_guard.limits import PROXIES, Lane, Limits, LogLimit, limited_http, open_files, serve
from space_guard.requests import openai_error
from space_guard.setup import Problems

INFERENCE = {"/v1/models": "GET", "/v1/completions": "POST", "/v1/chat/completions": "POST"}
LIMITS = Limits(request_s=15.0, unread_s=60.0, head_bytes=64 << 10, keep_active=True)
MAX_VISITORS = 256  # connections without the key, except those on which a request is being answered
MAX_FILES = 1 << 16  # open files, of which each connection is one
KEEP_ALIVE_S = 120  # between two requests on one connection, a rollout may wait seconds for its environment
LOG_LINES = 20  # messages per minute from one place in uvicorn's code; each may be a traceback of kilobytes


class SpaceFollower(Follower):
    """A follower that knows which variable the owner must fix if the bucket cannot be read."""

    problems: Problems = MappingProxyType({})

    def status(self) -> ReplicaEvent:
        return self.report(0).status

    def explain(self, error: Exception | None) -> str:
        self.problems = access_problems(error, self._reader.bucket.url) if error else {}
        return "; ".join(f"{name}: {problem}" for name, problem in self.problems.items()) or f"{error}"


def create_app(settings: Settings) -> FastAPI:
    """The complete Space as one ASGI app; the follower and vLLM live as long as the app."""
    bucket, vllm, folder = open_bucket(settings.bucket), VllmServer(settings), Path(settings.folder)
    reader = RunReader(bucket, settings.run)
    follower = SpaceFollower(reader, vllm, name=settings.name, folder=folder, poll_s=settings.poll_s)
    vllm.follower = follower

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        vllm.attach(asyncio.get_running_loop())
        follower.start()
        yield
        await asyncio.to_thread(follower.stop)

    app = FastAPI(title="Delta Weight Sync replica", lifespan=lifespan, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether a version is served."""
        return JSONResponse(follower.status().model_dump(), 200 if follower.serving else 503)

    @app.get("/status")
    async def status(after: int = -1) -> ReplicaReport:
        """Version, digest and state, and the commits of versions newer than `after`."""
        return follower.report(after)

    @app.post("/delta_weight_sync/poke")
    async def poke() -> None:
        """Look at the bucket now."""
        follower.poke()

    mount(app, bucket, settings.run, controls=follower.commands, key=settings.key, own_report=follower.report)
    app.add_middleware(pass_inference, vllm=vllm, follower=follower)
    if "SPACE_ID" in os.environ:
        app.add_middleware(SETUP.show_page, problems=lambda: follower.problems)
    capacity = settings.max_requests or 4 * settings.max_num_seqs
    # If inference is open without a key, every client counts as having the key. Then none may send grammars.
    grammars = bool(settings.key) or not settings.open_inference
    app.add_middleware(
        Gate,
        key=settings.key,
        open_inference=settings.open_inference,
        lanes={
            "page": Lane(64, seconds=60.0),
            "open pages": Lane(128),  # one connection each, for as long as the page is open
            # A view of the dashboard may rebuild a model; more requests would only wait for each other.
            "reading": Lane(16, seconds=600.0),
            "inference": Lane(capacity, settings.request_s),
        },
        readers={
            "completion": Completions(lambda: vllm.context, min(capacity, settings.max_num_seqs), grammars),
            "event": DashboardCalls(app.state.dashboard_events),
        },
    )
    return app


def pass_inference(app: ASGIApp, *, vllm: VllmServer, follower: SpaceFollower) -> ASGIApp:
    """ASGI middleware: passes inference requests directly to vLLM, without the cost of FastAPI's layers."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        died = False

        async def unless_dead(message: Message) -> None:
            """Pass vLLM's answer on, unless vLLM answers 500 because its engine has died."""
            nonlocal died
            died = died or (message.get("status") == 500 and not vllm.alive())
            if not died:
                await send(message)

        if scope["type"] != "http" or INFERENCE.get(scope["path"]) != scope["method"]:
            return await app(scope, receive, send)
        reason = "vLLM is being restarted"
        if follower.serving is None:
            reason = f"no version is served yet: {follower.status().state}"
        elif vllm.app is not None:
            await vllm.app(scope, receive, unless_dead)
            if not died:
                return None
        refusal = HTTPException(503, f"{reason}; try again in a moment", {"Retry-After": "1"})
        return await openai_error(refusal, "unavailable")(scope, receive, send)

    return answer


def listen(app: ASGIApp, host: str, port: int, key: str = "") -> None:
    """Serve `app` until SIGTERM, with limits for clients without `key` (see `space_guard.limits`)."""
    logging.getLogger("uvicorn.error").addFilter(LogLimit(LOG_LINES))
    open_files(MAX_FILES)
    serve(
        app,
        host=host,
        port=port,
        access_log=False,
        log_level="error",  # uvicorn warns about each request that is not HTTP
        http=limited_http(LIMITS, MAX_VISITORS, key),
        forwarded_allow_ips=PROXIES if "SPACE_ID" in os.environ else None,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
    )
