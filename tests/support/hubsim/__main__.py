"""The simulated Hub as one ASGI app."""

import mimetypes
import os
import socket
import sys
import threading
from pathlib import Path
from urllib.parse import quote

import httpx
import uvicorn
from fastapi import FastAPI, Header, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.background import BackgroundTask
from starlette.types import ASGIApp, Receive, Scope, Send
from werkzeug.serving import make_ssl_devcert

from .accounts import READ
from .common import HubError
from .control import FaultMiddleware, Plan, control_routes
from .jobs import SITE, Jobs
from .routes import bucket_routes, job_routes, repo_routes, space_routes
from .spaces import SpaceState
from .store import Hub
from .xet import OWN_CAS, bridge_routes, cas_routes


def build(jobs: Jobs, address: str, addresses: list[str]) -> ASGIApp:
    """The Hub as an app; `addresses` are the URLs of its Spaces' apps."""
    hub = jobs.hub
    plan = Plan()
    main = _main(jobs, plan)
    spaces = AppProxy(hub, address)

    def label(scope: Scope) -> str:
        """A request as faults and the log name it; one to a Space's app begins with the Space."""
        space = spaces.space_at(scope)
        return f"{scope['method']} {f'{space.id}:' if space else ''}{scope['path']}"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for_an_app = "http://{}:{}".format(*scope["server"]) in addresses
        await (spaces if for_an_app else main)(scope, receive, send)

    return FaultMiddleware(app, plan, label)


def _main(jobs: Jobs, plan: Plan) -> FastAPI:
    hub = jobs.hub
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    @app.get("/api/whoami-v2")
    async def whoami(authorization: str | None = Header(None)) -> dict[str, object]:
        return hub.accounts.whoami(authorization)

    app.include_router(job_routes(jobs))
    for make in (bucket_routes, space_routes, repo_routes):
        app.include_router(make(hub))
    app.include_router(bridge_routes(hub.cas))
    for place in ("/cas", OWN_CAS):
        app.include_router(cas_routes(hub.cas, place))
    app.include_router(control_routes(jobs, plan))
    app.exception_handler(HubError)(_refuse)
    app.exception_handler(405)(_no_such_route)
    return app


async def _no_such_route(request: Request, _error: Exception) -> JSONResponse:
    """The Hub answers a wrong method like a wrong path."""
    return await _refuse(request, HubError(404, "Not Found"))


async def _refuse(request: Request, error: HubError) -> JSONResponse:
    headers = {"X-Error-Message": error.message} | ({"X-Error-Code": error.code} if error.code else {})
    there = {"url": f"{request.base_url}{error.url}"} if error.url else {}
    return JSONResponse({"error": error.message, **there}, error.status, headers)


RUNNING = ("RUNNING", "RUNNING_BUILDING", "RUNNING_APP_STARTING")
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "date"}


class AppProxy:
    """The apps of all Spaces, each at a port of its own."""

    def __init__(self, hub: Hub, address: str) -> None:
        self.hub = hub
        self.address = address
        self.client = httpx.AsyncClient(timeout=None, trust_env=False)

    def space_at(self, scope: Scope) -> SpaceState | None:
        """The Space whose port this is; None where it has none yet, or no longer."""
        url = "http://{}:{}".format(*scope["server"])
        return next((space for space in self.hub.spaces.values() if space.address == url), None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(Request(scope, receive))
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        space = self.space_at(request.scope)
        if space is None or not self._may_see(space, request):
            return _page(404, "404")
        if (stage := space.visit()) not in RUNNING:
            return _page(503, f"Your space is in stage {stage}")
        if space.sdk == "static":
            return await self._file(space, request)
        if not space.upstream:
            return _page(502, "The test has set no upstream for this Space")
        return await self._forward(space.upstream, request)

    def _may_see(self, space: SpaceState, request: Request) -> bool:
        try:
            self.hub.space(space.id, request.headers.get("authorization") if space.repo.private else None)
        except HubError:
            return False
        return True

    async def _file(self, space: SpaceState, request: Request) -> Response:
        """What a static Space shows: the file of its repository, or of a folder its index.html."""
        path = request.url.path.lstrip("/")
        path += "index.html" * (path == "" or path.endswith("/"))
        known = {key: value for key, value in request.headers.items() if key == "authorization"}
        file = f"{self.address}/spaces/{space.id}/resolve/main/{quote(path)}"
        got = await self.client.get(file, headers=known)
        return Response(got.content, got.status_code, media_type=mimetypes.guess_type(path)[0])

    async def _forward(self, upstream: str, request: Request) -> Response:
        query = request.scope["query_string"]
        raw_path = request.scope["raw_path"] + (b"?" + query if query else b"")
        url = httpx.URL(upstream).copy_with(raw_path=raw_path)
        headers = [(key, value) for key, value in request.headers.items() if key not in HOP_BY_HOP]
        asked = self.client.build_request(request.method, url, headers=headers, content=await request.body())
        try:
            answer = await self.client.send(asked, stream=True)
        except httpx.TransportError:
            return _page(502, "The upstream of this Space does not answer")
        passed = {key: value for key, value in answer.headers.items() if key not in HOP_BY_HOP}
        closing = BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, passed, background=closing)


class JobProxy(AppProxy):
    """The ports that Jobs expose, at https://<id>--<port>.hf.jobs: for a token that may read there."""

    def __init__(self, jobs: Jobs, address: str) -> None:
        super().__init__(jobs.hub, address)
        self.jobs = jobs

    async def _answer(self, request: Request) -> Response:
        name, _, port = (request.url.hostname or "").removesuffix(".hf.jobs").partition("--")
        job = self.jobs.all.get(name)
        try:
            self.jobs.check(job.owner["name"] if job else "", request.headers.get("authorization"), READ)
        except HubError as error:
            return JSONResponse({"error": error.message}, error.status)
        job.look()
        if job.stage != "RUNNING" or int(port) not in job.ports:
            return JSONResponse({"error": "Not Found"}, 404)
        return await self._forward(f"http://127.0.0.1:{job.ports[int(port)]}", request)


def serve_job_ports(jobs: Jobs, address: str, folder: Path) -> None:
    """Serve Jobs' ports over TLS, in a thread, and write down in `jobs.environ` how a process finds them."""
    folder.mkdir()
    certificate, key = make_ssl_devcert(str(folder / "tls"), host="hf.jobs")
    (folder / "sitecustomize.py").write_text(SITE)
    listener = socket.create_server(("127.0.0.1", 0))
    port = str(listener.getsockname()[1])
    jobs.environ |= {"SSL_CERT_FILE": certificate, "SIMULATED_JOBS_PORT": port, "PYTHONPATH": str(folder)}
    tls = {"ssl_certfile": certificate, "ssl_keyfile": key}
    config = uvicorn.Config(JobProxy(jobs, address), log_level="critical", lifespan="off", **tls)
    threading.Thread(target=uvicorn.Server(config).run, args=[[listener]], daemon=True).start()


def _page(status: int, text: str) -> HTMLResponse:
    return HTMLResponse(f"<!DOCTYPE html><title>{text}</title>", status)


SPACES = 12  # how many there can be at a time


def main() -> None:
    """Serve until the parent process closes stdin or ends."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + SPACES)]
    ports = [listener.getsockname()[1] for listener in listeners]
    own, *addresses = (f"http://127.0.0.1:{port}" for port in ports)
    root = Path(sys.argv[1])
    jobs = Jobs(Hub(root, addresses), own, {})
    serve_job_ports(jobs, own, root / "ports")
    app = build(jobs, own, addresses)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", date_header=False))

    def end_with_parent() -> None:
        sys.stdin.read()
        jobs.stop()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    print(ports[0], flush=True)
    server.run(sockets=listeners)


if __name__ == "__main__":
    main()
