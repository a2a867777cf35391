"""The public face: the only port of a vLLM Space. Inference, status and the dashboard; nothing else.

vLLM's app is in the same process, behind the gate: what it offers beyond the three inference routes below
cannot be reached from outside (see `gate.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.runlog import ReplicaReport
from delta_weight_sync.store import open_bucket
from delta_weight_sync.vllm.follower import Follower
from delta_weight_sync.vllm.progress import CountingReader
from inference_space import dashboard, setup_page
from inference_space.access import refusal
from inference_space.completions import Completions
from inference_space.connections import Connection
from inference_space.dashboard_calls import Calls
from inference_space.embedded_vllm import EmbeddedVllm
from inference_space.ending import exit_when_asked
from inference_space.gate import Gate
from inference_space.places import Lane
from inference_space.settings import Settings, settings_from
from inference_space.sparing import Sparing

INFERENCE = {"/v1/models": "GET", "/v1/completions": "POST", "/v1/chat/completions": "POST"}
KEEP_ALIVE_S = 120  # a policy plays its environment for seconds between two requests on one connection
LANES = {
    "page": Lane(at_once=64, seconds=60.0),
    "open pages": Lane(at_once=128, seconds=None),  # a connection each, for as long as it is looked at
    # A view of the dashboard may rebuild a model; more of them at once would only wait for each other.
    "reading": Lane(at_once=16, seconds=600.0),
}
# In the Hub's network its proxies have addresses that nobody has on the internet. They append the address of
# whom they speak for: the last that is not theirs is the visitor's, whatever was written before it.
_PROXIES_OF_THE_HUB = "10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,100.64.0.0/10,fc00::/7,127.0.0.1"
log = logging.getLogger("delta_weight_sync")


class SpaceFollower(Follower):
    """It also knows what the owner must set before the bucket can be read."""

    problems: Mapping[str, str] = {}

    def explain(self, error: Exception | None) -> str:
        """As in `Follower`."""
        self.problems = refusal(error, self._reader.bucket.url) if error else {}
        return "; ".join(f"{name}: {problem}" for name, problem in self.problems.items()) or f"{error}"


def create_app(settings: Settings) -> FastAPI:
    """The whole Space as one ASGI app; the follower and vLLM live as long as it does."""
    bucket, vllm, folder = open_bucket(settings.bucket), EmbeddedVllm(settings), Path(settings.folder)
    reader = CountingReader(bucket, settings.run)
    follower = SpaceFollower(reader, vllm, name=settings.name, folder=folder, poll_s=settings.poll_s)
    vllm.follower = follower

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        vllm.attach(asyncio.get_running_loop())
        follower.start()
        yield
        await asyncio.to_thread(follower.stop)

    app = FastAPI(title="Delta Weight Sync replica", lifespan=lifespan, openapi_url=None)
    _add_status(app, follower)
    dashboard.mount(app, bucket, settings.run, controls=follower.orders, key=settings.key)
    app.add_middleware(Inference, vllm=vllm, follower=follower)
    if "SPACE_ID" in os.environ:
        app.add_middleware(setup_page.SetupPage, problems=lambda: follower.problems)
    places = settings.max_requests or 4 * settings.max_num_seqs
    app.add_middleware(
        Gate,
        key=settings.key,
        open_inference=settings.open_inference,
        lanes={**LANES, "inference": Lane(places, settings.request_s)},
        readers={
            "completion": Completions(lambda: vllm.context, min(places, settings.max_num_seqs)),
            "event": Calls(app.state.dashboard_events),
        },
    )
    return app


def _add_status(app: FastAPI, follower: Follower) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Live: the Space answers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Ready: a version is served."""
        status = follower.report(0).status
        return JSONResponse(status.model_dump(), 200 if follower.serving else 503)

    @app.get("/status")
    async def status(after: int = -1) -> ReplicaReport:
        """Version, digest and state, and the commits of versions newer than `after`."""
        return follower.report(after)

    @app.post("/delta_weight_sync/poke")
    async def poke() -> None:
        """Look at the bucket now."""
        follower.poke()


class Inference:
    """ASGI middleware: gives vLLM's own routes to vLLM, before the app, whose layers cost as much."""

    def __init__(self, app: ASGIApp, *, vllm: EmbeddedVllm, follower: Follower) -> None:
        self._app, self._vllm, self._follower = app, vllm, follower

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or INFERENCE.get(scope["path"]) != scope["method"]:
            await self._app(scope, receive, send)
        elif self._follower.serving is None or self._vllm.app is None:
            reason = f"no version is served yet: {self._follower.report(0).status.state}"
            await _unavailable(reason)(scope, receive, send)
        else:
            await self._ask(self._vllm.app, scope, receive, send)

    async def _ask(self, vllm: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Have vLLM answer; where its engine died over it, say so as what it is: worth another try."""
        died = False

        async def unless_dead(message: Message) -> None:
            nonlocal died
            died = died or (message.get("status") == 500 and not self._vllm.alive())
            if not died:
                await send(message)

        await vllm(scope, receive, unless_dead)
        if died:
            await _unavailable("vLLM is being restarted")(scope, receive, send)


def _unavailable(reason: str) -> JSONResponse:
    error = {"message": f"{reason}; try again in a moment", "type": "unavailable", "code": 503}
    return JSONResponse({"error": error}, 503, {"retry-after": "1"})


def serve() -> None:
    """Start the Space. Where it is not set up, it says so: on the Hub on its page, elsewhere as it ends."""
    os.umask(0o077)  # its files, and the sockets of vLLM's engine in /tmp, are for this user alone
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout))
    problems = setup_page.problems_of(os.environ) if "SPACE_ID" in os.environ else {}
    if problems:
        log.error("replica: %s", setup_page.sentence(problems))
        return _serve(setup_page.create_app(problems), *_address(os.environ))
    try:
        settings = settings_from(os.environ)
        app = create_app(settings)
    except DeltaWeightSyncError as error:
        sys.exit(f"replica: {error}")
    return _serve(app, settings.host, settings.port)


def _address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port where the settings as a whole cannot be used."""
    default, port = Settings.model_fields, environ.get("REPLICA_PORT", "")
    return (
        environ.get("REPLICA_HOST", default["host"].default),
        int(port) if port.isdecimal() else default["port"].default,
    )


def _serve(app: ASGIApp, host: str, port: int) -> None:
    logging.getLogger("uvicorn.error").addFilter(Sparing())
    exit_when_asked()
    uvicorn.run(
        app,
        host=host,
        port=port,
        access_log=False,
        log_level="error",  # a warning is written for each request that is no HTTP
        http=Connection,
        forwarded_allow_ips=_PROXIES_OF_THE_HUB if "SPACE_ID" in os.environ else None,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
    )
