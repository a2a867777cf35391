"""The simulated Hub as one ASGI app."""

from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp

from .cas_api import cas_routes
from .faults import FaultMiddleware, Plan, control_routes
from .hub_api import hub_routes
from .store import Hub, HubError


def build(root: Path) -> ASGIApp:
    """A Hub without buckets that keeps its content under `root`."""
    hub, plan, app = Hub(root), Plan(), FastAPI(openapi_url=None, redirect_slashes=False)
    app.include_router(hub_routes(hub))
    app.include_router(cas_routes(hub.cas))
    app.include_router(control_routes(plan))

    @app.exception_handler(HubError)
    async def refuse(_request: Request, error: HubError) -> JSONResponse:
        headers = {"X-Error-Message": error.message} | ({"X-Error-Code": error.code} if error.code else {})
        return JSONResponse({"error": error.message}, error.status, headers)

    return FaultMiddleware(app, plan)
