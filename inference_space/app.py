"""The gateway: the only public port of a vLLM Space. Inference, status and the dashboard; nothing else.

`python -m inference_space.app` starts it with the settings in the environment. vLLM listens on loopback,
and what it offers beyond the three inference routes below is not reachable from outside: see `gate.py`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from delta_weight_sync.protocol import Manifest, ProtocolError
from delta_weight_sync.runlog import ReplicaReport
from delta_weight_sync.store import BucketError, open_bucket
from inference_space import dashboard, setup_page
from inference_space.follower import Follower
from inference_space.gate import Gate, Lane
from inference_space.progress import CountingReader
from inference_space.settings import Settings, SettingsError, settings_from
from inference_space.vllm_server import VllmServer

SPANS = "x-policy-versions"  # written by version_headers.py, inside vLLM
# An answer that spans hundreds of commits has a long header; common clients refuse more than 8190 bytes.
_MAX_FROM_VLLM, _MAX_TO_CLIENT = 1 << 20, 1 << 12
INFERENCE = {"/v1/models": "GET", "/v1/completions": "POST", "/v1/chat/completions": "POST"}
KEEP_ALIVE_S = 120  # a policy plays its environment for seconds between two requests on one connection
# A view of the dashboard may rebuild a model; more of them at once would only wait for each other.
READING = Lane(at_once=16, seconds=600.0)


def create_app(settings: Settings) -> FastAPI:
    """The whole Space as one ASGI app; the follower and vLLM live as long as it does."""
    bucket = open_bucket(settings.bucket)
    vllm = VllmServer(settings)
    follower = Follower(CountingReader(bucket, settings.run), vllm, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        Path(settings.folder).mkdir(parents=True, exist_ok=True)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, connect=5.0)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout, max_field_size=_MAX_FROM_VLLM)
        async with session:
            app.state.session = session
            follower.start()
            yield
            follower.stop()

    app = FastAPI(title="Delta Weight Sync replica", lifespan=lifespan, openapi_url=None)
    _add_status(app, follower)
    dashboard.mount(app, bucket, settings.run, controls=follower.orders, key=settings.key)
    app.add_middleware(Inference, vllm=vllm, follower=follower)
    if "SPACE_ID" in os.environ:
        app.add_middleware(setup_page.SetupPage, problems=lambda: follower.problems)
    inference = Lane(settings.max_requests or 4 * settings.max_num_seqs, settings.request_s)
    key = "" if settings.open_inference else settings.key
    app.add_middleware(Gate, key=key, inference=inference, reading=READING)
    return app


def _add_status(app: FastAPI, follower: Follower) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Live: the gateway answers."""
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


class Inference:
    """ASGI middleware: takes vLLM's own routes to vLLM, before the app, whose layers cost as much."""

    def __init__(self, app: ASGIApp, *, vllm: VllmServer, follower: Follower) -> None:
        self._app, self._vllm, self._follower = app, vllm, follower

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        answer = self._app
        if scope["type"] == "http" and INFERENCE.get(scope["path"]) == scope["method"]:
            answer = await self._forward(Request(scope, receive))
        await answer(scope, receive, send)

    async def _forward(self, request: Request) -> Response:
        serving = self._follower.serving
        if serving is None:
            return _unavailable(f"no version is served yet: {self._follower.report(0).status.state}")
        body = await request.body()
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        session: aiohttp.ClientSession = request.app.state.session
        try:
            url = f"{self._vllm.url}{request.scope['path']}"
            answer = await session.request(request.method, url, data=body or None, headers=headers)
            spans = answer.headers.get(SPANS, "")
            return await _relay(answer, _policy_headers(spans, serving, self._follower))
        except aiohttp.ClientError:
            return _unavailable("vLLM is being restarted")


async def _relay(answer: aiohttp.ClientResponse, headers: dict[str, str]) -> Response:
    headers["content-type"] = answer.content_type
    if answer.content_type == "text/event-stream":
        return StreamingResponse(_parts(answer), answer.status, headers)
    return Response(await answer.read(), answer.status, headers)


async def _parts(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for part in answer.content.iter_any():
            yield part
    finally:
        answer.close()  # whoever left early: vLLM need not go on


def _policy_headers(spans: str, serving: Manifest, follower: Follower) -> dict[str, str]:
    """Which weights made the answer: the oldest version of all its tokens, and the span of each version.

    vLLM knows the spans when an answer is complete. A stream begins before that, so its headers name the
    version that was served then: the oldest one that can produce a token of it.
    """
    versions = [int(span.split(":")[0]) for span in re.split("[,;]", spans) if span]
    oldest = min(versions, default=serving.version)
    term, sync = follower.syncs.get(oldest, (0, 0))  # unknown: older than anything a trainer has sent
    headers = {"x-policy-version": str(oldest), "x-policy-term": str(term), "x-policy-sync": str(sync)}
    return headers | ({SPANS: spans} if 0 < len(spans) < _MAX_TO_CLIENT else {})


def _unavailable(reason: str) -> JSONResponse:
    error = {"message": f"{reason}; try again in a moment", "type": "unavailable", "code": 503}
    return JSONResponse({"error": error}, 503, {"retry-after": "1"})


def main() -> None:
    """Start the Space. Where it is not set up, it says so: on the Hub on its page, elsewhere as it ends."""
    problems = setup_page.problems_of(os.environ) if "SPACE_ID" in os.environ else {}
    if problems:
        print(f"replica: {setup_page.sentence(problems)}", flush=True)
        return _serve(setup_page.create_app(problems), *_address(os.environ))
    try:
        settings = settings_from(os.environ)
        app = create_app(settings)
    except (SettingsError, ProtocolError, BucketError) as error:
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
    uvicorn.run(
        app,
        host=host,
        port=port,
        access_log=False,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
    )


if __name__ == "__main__":
    main()
