"""The gateway: the only public port of a vLLM Space. Inference, status and the dashboard; nothing else.

`python -m inference_space.app` starts it with the settings in the environment. vLLM listens on loopback,
and what it offers beyond the three inference routes below is not reachable from outside.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.background import BackgroundTask

from inference_space import dashboard
from inference_space.follower import Follower
from inference_space.settings import Settings, SettingsError, settings_from
from inference_space.vllm_server import VllmServer
from shared.buckets import open_bucket
from shared.history import RunReader
from shared.protocol import Manifest
from shared.runlog import ReplicaReport

SPANS = "x-policy-versions"  # written by version_headers.py, inside vLLM
# An answer that spans hundreds of commits has a long header; common clients refuse more than 8190 bytes.
_MAX_FROM_VLLM, _MAX_TO_CLIENT = 1 << 20, 1 << 12
INFERENCE = {"/v1/models": "GET", "/v1/completions": "POST", "/v1/chat/completions": "POST"}


def create_app(settings: Settings) -> FastAPI:
    """The whole Space as one ASGI app; the follower and vLLM live as long as it does."""
    bucket = open_bucket(settings.bucket)
    vllm = VllmServer(settings)
    follower = Follower(RunReader(bucket, settings.run), vllm, settings)

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

    app = FastAPI(title="Delta Weight Sync replica", lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_status(app, follower)
    for path, method in INFERENCE.items():
        app.add_route(path, _forward(vllm, follower), methods=[method])
    dashboard.mount(app, bucket, settings.run, controls=follower.orders, key=settings.key)
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


def _forward(vllm: VllmServer, follower: Follower) -> Callable[[Request], Awaitable[Response]]:
    async def forward(request: Request) -> Response:
        serving = follower.serving
        if serving is None:
            return _unavailable(f"no version is served yet: {follower.report(0).status.state}")
        body = await request.body()
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        session: aiohttp.ClientSession = request.app.state.session
        try:
            url = f"{vllm.url}{request.url.path}"
            answer = await session.request(request.method, url, data=body or None, headers=headers)
            return await _relay(answer, _policy_headers(answer.headers.get(SPANS, ""), serving, follower))
        except aiohttp.ClientError:
            return _unavailable("vLLM is being restarted")

    return forward


async def _relay(answer: aiohttp.ClientResponse, headers: dict[str, str]) -> Response:
    headers["content-type"] = answer.content_type
    if answer.content_type == "text/event-stream":
        closing = BackgroundTask(answer.close)
        return StreamingResponse(answer.content.iter_any(), answer.status, headers, background=closing)
    return Response(await answer.read(), answer.status, headers)


def _policy_headers(spans: str, serving: Manifest, follower: Follower) -> dict[str, str]:
    """Which weights made the answer: the oldest version of all its tokens, and the span of each version.

    vLLM knows the spans when an answer is complete. A stream begins before that, so its headers name the
    version that was served then: the oldest one that can produce a token of it.
    """
    versions = [int(span.split(":")[0]) for span in re.split("[,;]", spans) if span]
    oldest = min(versions, default=serving.version)
    epoch, sync = follower.syncs.get(oldest, (0, 0))  # unknown: older than anything a trainer has sent
    headers = {"x-policy-version": str(oldest), "x-policy-epoch": str(epoch), "x-policy-sync": str(sync)}
    return headers | ({SPANS: spans} if 0 < len(spans) < _MAX_TO_CLIENT else {})


def _unavailable(reason: str) -> JSONResponse:
    error = {"message": f"{reason}; try again in a moment", "type": "unavailable", "code": 503}
    return JSONResponse({"error": error}, 503, {"retry-after": "1"})


def main() -> None:
    """Start the Space."""
    try:
        settings = settings_from(os.environ)
    except SettingsError as error:
        sys.exit(f"replica: {error}")
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=5,
    )


if __name__ == "__main__":
    main()
