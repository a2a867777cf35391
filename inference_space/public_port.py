"""The only public port of a vLLM Space: inference, status and the dashboard.

vLLM's app runs in the same process. Of its routes, only the three for inference are open, through the guard.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

from fastapi import FastAPI
from fastapi.responses import FileResponse, JSONResponse
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from delta_weight_sync.reader import RunReader
from delta_weight_sync.runlog import ReplicaEvent, ReplicaReport
from delta_weight_sync.store import open_bucket
from delta_weight_sync.vllm.follower import Follower
from inference_space.completions import MAX_BODY, Completions, Inference, openai_error
from inference_space.dashboard import calls
from inference_space.dashboard.page import mount
from inference_space.settings import SETUP, Settings, access_problems
from inference_space.vllm_server import VllmServer
from space_guard.guard import FRAMING, SAFE_HEADERS, Guard, Route
from space_guard.serving import serve
from space_guard.setup import Problems

_FILE = r"(/[\w-][\w.-]*)+"  # no part of the path begins with a dot
# A route that some library adds is closed until you list it here.
ROUTES = (
    Route("/"),
    Route("/", "HEAD"),
    Route("/(health|ready|status|v1/models)"),
    Route("/v1/(chat/)?completions", "POST", keyed=True, max_body=MAX_BODY),
    # A poke makes the replica look at the bucket. All replicas of a user share one quota of requests to the
    # Hub, and pokes use this quota. So a poke needs the key, too.
    Route("/delta_weight_sync/poke", "POST", keyed=True),
    Route("/dashboard/(frame|inside|bucket|delta|verify|explain|object)"),
    Route("/(badge[.]svg|agents[.]md)"),
    # Only the routes of Gradio that the page needs. The owner's buttons also call run/predict, which needs no
    # key here: the dashboard itself checks that the key or the login is the owner's.
    Route(f"/(assets|static){_FILE}"),
    Route(r"/(theme\.css|favicon\.ico)"),
    Route(r"/gradio_api/heartbeat/\w{1,40}"),
    Route(calls.PATH, "POST", max_body=calls.MAX_BODY),
    Route("/login/(huggingface|callback)"),
    Route("/logout"),
)

# Only these headers reach the apps, so keys and tokens do not. Given an `Origin`, Gradio would answer with
# CORS headers that let any site read the answer. The host is replaced, because a client can send any host.
_PASSED_ON = frozenset(
    b"accept accept-encoding accept-language content-type cookie if-none-match user-agent"
    b" x-policy-exact-sync x-policy-min-sync".split()
)
_HOST = (b"host", b"replica")


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
    bucket = open_bucket(settings.bucket)
    vllm = VllmServer(settings)
    folder = Path(settings.folder)
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

    @app.get("/agents.md")
    async def agents() -> FileResponse:
        """How a program uses this Space, as the Hub describes Gradio Spaces to coding agents."""
        return FileResponse(Path(__file__).with_name("agents.md"), media_type="text/plain")

    @app.post("/delta_weight_sync/poke")
    async def poke() -> None:
        """Look at the bucket now."""
        follower.poke()

    controls = follower.commands
    mount(app, bucket, settings.run, controls=controls, key=settings.key, reports=[follower.report])
    capacity = settings.max_requests or 4 * settings.max_num_seqs
    app.add_middleware(
        Inference,
        vllm=vllm,
        unready=lambda: follower.status().state if follower.serving is None else None,
        completions=Completions(lambda: vllm.context, min(capacity, settings.max_num_seqs)),
        capacity=capacity,
        seconds=settings.request_s,
    )
    if "SPACE_ID" in os.environ:
        app.add_middleware(SETUP.show_page, problems=lambda: follower.problems)
    add_guard(app, settings.key)
    return app


def add_guard(app: Starlette, key: str) -> None:
    """Let only requests for `ROUTES` reach the app, without keys and tokens."""
    app.add_middleware(only_known_headers)
    app.add_middleware(Guard, routes=ROUTES, key=key, secret="REPLICA_KEY", refuse=openai_error)
    app.add_middleware(protect_browsers)


def only_known_headers(app: ASGIApp) -> ASGIApp:
    """ASGI middleware: passes on only the headers that the apps need."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [_HOST, *(pair for pair in scope["headers"] if pair[0] in _PASSED_ON)]
            scope = {**scope, "headers": headers}
        await app(scope, receive, send)

    return answer


def protect_browsers(app: ASGIApp) -> ASGIApp:
    """ASGI middleware: adds the headers that protect browsers. A page brings its own content policy."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update({**dict(SAFE_HEADERS), "Referrer-Policy": "same-origin"})
                headers.setdefault("Content-Security-Policy", f"default-src 'none'; {FRAMING}")
            await send(message)

        await app(scope, receive, protected)

    return answer


def listen(app: ASGIApp, host: str, port: int) -> None:
    """Serve `app` until SIGTERM."""
    serve(
        app,
        host=host,
        port=port,
        ws="none",  # no route is a WebSocket
        log_level="error",  # uvicorn warns about each request that is not HTTP
        timeout_graceful_shutdown=5,
    )
