"""The simulated Hub as one ASGI app."""

import os
import socket
import sys
import threading
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Header, Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .bucket_routes import bucket_routes
from .common import HubError
from .control import FaultMiddleware, Plan, control_routes
from .repo_routes import repo_routes
from .space_routes import AppProxy, space_routes
from .store import Hub
from .xet import OWN_CAS, bridge_routes, cas_routes


def build(root: Path, addresses: list[str]) -> ASGIApp:
    """An empty Hub that stores large files under `root`; `addresses` are the URLs of its Spaces' apps."""
    hub, plan = Hub(root, addresses), Plan()
    main, spaces = _main(hub, plan), AppProxy(hub)

    def label(scope: Scope) -> str:
        """A request as faults and the log name it; one to a Space's app begins with the Space."""
        space = spaces.space_at(scope)
        return f"{scope['method']} {f'{space.id}:' if space else ''}{scope['path']}"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for_an_app = "http://{}:{}".format(*scope["server"]) in addresses
        await (spaces if for_an_app else main)(scope, receive, send)

    return FaultMiddleware(app, plan, label)


def _main(hub: Hub, plan: Plan) -> FastAPI:
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    @app.get("/api/whoami-v2")
    async def whoami(authorization: str | None = Header(None)) -> dict[str, object]:
        return hub.accounts.whoami(authorization)

    for make in (bucket_routes, space_routes, repo_routes):
        app.include_router(make(hub))
    app.include_router(bridge_routes(hub.cas))
    for place in ("/cas", OWN_CAS):
        app.include_router(cas_routes(hub.cas, place))
    app.include_router(control_routes(hub, plan))
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


SPACES = 12  # how many there can be at a time


def main() -> None:
    """Serve until the parent process closes stdin or ends."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + SPACES)]
    own_port, *ports = [listener.getsockname()[1] for listener in listeners]
    app = build(Path(sys.argv[1]), [f"http://127.0.0.1:{port}" for port in ports])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", date_header=False))
    threading.Thread(target=lambda: os._exit(0) if not sys.stdin.read() else None, daemon=True).start()
    print(own_port, flush=True)
    server.run(sockets=listeners)


if __name__ == "__main__":
    main()
