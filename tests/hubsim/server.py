"""The simulated Hub as one ASGI app."""

from pathlib import Path

from fastapi import FastAPI, Header, Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .bucket_files_api import bucket_file_routes
from .buckets_api import bucket_routes
from .cas_api import cas_routes
from .control import control_routes
from .doors import Doors
from .errors import HubError
from .faults import FaultMiddleware, Plan
from .files_api import file_routes
from .repos_api import repo_routes
from .spaces_api import space_routes
from .store import Hub
from .trees_api import tree_routes


def build(root: Path, doors: list[str]) -> ASGIApp:
    """An empty Hub that keeps large files under `root`; its Spaces are visited at the URLs in `doors`."""
    hub, plan = Hub(root, doors), Plan()
    main, spaces = _main(hub, plan), Doors(hub)

    def label(scope: Scope) -> str:
        """What faults match and the log of requests holds; for the app of a Space with the Space in front."""
        space = spaces.space_at(scope)
        return f"{scope['method']} {f'{space.id}:' if space else ''}{scope['path']}"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        at_a_door = "http://{}:{}".format(*scope["server"]) in doors
        await (spaces if at_a_door else main)(scope, receive, send)

    return FaultMiddleware(app, plan, label)


def _main(hub: Hub, plan: Plan) -> FastAPI:
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    @app.get("/api/whoami-v2")
    async def whoami(authorization: str | None = Header(None)) -> dict[str, object]:
        return hub.accounts.whoami(authorization)

    for make in (bucket_file_routes, bucket_routes, space_routes, repo_routes, tree_routes, file_routes):
        app.include_router(make(hub))
    app.include_router(cas_routes(hub.cas))
    app.include_router(control_routes(hub, plan))
    app.exception_handler(HubError)(_refuse)
    app.exception_handler(405)(_no_such_route)
    return app


async def _no_such_route(request: Request, _error: Exception) -> JSONResponse:
    """The Hub does not tell a wrong method from a wrong path."""
    return await _refuse(request, HubError(404, "Not Found"))


async def _refuse(request: Request, error: HubError) -> JSONResponse:
    headers = {"X-Error-Message": error.message} | ({"X-Error-Code": error.code} if error.code else {})
    there = {"url": f"{request.base_url}{error.url}"} if error.url else {}
    return JSONResponse({"error": error.message, **there}, error.status, headers)
