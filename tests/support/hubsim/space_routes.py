"""The Hub's endpoints that only Spaces have, as huggingface_hub calls them."""

import json
from typing import Annotated, Any

import httpx
from fastapi import APIRouter, Body, Depends, Header
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .common import HubError
from .spaces import SpaceState
from .store import Hub, check_plan

Auth = Annotated[str | None, Header()]
API = "/api/spaces/{owner}/{name}"


def space_routes(hub: Hub) -> APIRouter:
    async def readable(owner: str, name: str, authorization: Auth = None) -> SpaceState:
        return hub.space(f"{owner}/{name}", authorization)

    async def writable(owner: str, name: str, authorization: Auth = None) -> SpaceState:
        return hub.space(f"{owner}/{name}", authorization, write=True)

    reader, writer = Annotated[SpaceState, Depends(readable)], Annotated[SpaceState, Depends(writable)]
    routes = APIRouter()

    @routes.get(API + "/runtime")
    async def runtime(space: reader) -> dict[str, Any]:
        return space.look()

    @routes.post(API + "/pause")
    async def pause(space: writer) -> dict[str, Any]:
        space.enter("PAUSED")
        return space.runtime()

    @routes.post(API + "/restart")
    async def restart(space: writer, factory: bool = False) -> dict[str, Any]:
        space.restart(factory=factory)
        return space.runtime()

    @routes.post(API + "/hardware")
    async def request_hardware(space: writer, wish: dict[str, Any]) -> dict[str, Any]:
        check_plan(hub.accounts.accounts[space.id.split("/")[0]], space.sdk, {"hardware": wish["flavor"]})
        if space.requested != wish["flavor"]:
            space.requested = wish["flavor"]
            space.start()
        space.sleep_time = wish.get("sleepTimeSeconds", space.sleep_time)
        return space.runtime()

    @routes.post(API + "/sleeptime")
    async def sleep_time(space: writer, wish: dict[str, Any]) -> dict[str, Any]:
        space.sleep_time = wish["seconds"]
        return space.runtime()

    def add(kind: str, seer: Any) -> None:
        def shown(space: SpaceState) -> dict[str, Any]:
            return {key: one.to_json(secret=kind == "secrets") for key, one in getattr(space, kind).items()}

        @routes.get(f"{API}/{kind}")
        async def read(space: seer) -> dict[str, Any]:
            return shown(space)

        @routes.post(f"{API}/{kind}")
        async def put(space: writer, wish: dict[str, Any]) -> dict[str, Any]:
            space.set(kind, wish["key"], wish["value"], wish.get("description"))
            return shown(space)

        @routes.delete(f"{API}/{kind}")
        async def delete(space: writer, wish: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
            space.unset(kind, wish["key"])
            return shown(space)

    add("variables", reader)  # every reader of the Space sees them
    add("secrets", writer)  # only a writer sees their names

    @routes.get(API + "/logs/{kind}")
    async def logs(space: writer, kind: str) -> Response:
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in space.logs[kind])
        return Response(lines, media_type="text/event-stream")

    return routes


RUNNING = ("RUNNING", "RUNNING_BUILDING", "RUNNING_APP_STARTING")
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "date"}


class AppProxy:
    """The apps of all Spaces, each at a port of its own."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
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
        if not space.upstream:
            return _page(502, "The test has set no upstream for this Space")
        return await self._forward(space.upstream, request)

    def _may_see(self, space: SpaceState, request: Request) -> bool:
        try:
            self.hub.space(space.id, request.headers.get("authorization") if space.repo.private else None)
        except HubError:
            return False
        return True

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
        return StreamingResponse(
            answer.aiter_raw(), answer.status_code, passed, background=BackgroundTask(answer.aclose)
        )


def _page(status: int, text: str) -> HTMLResponse:
    return HTMLResponse(f"<!DOCTYPE html><title>{text}</title>", status)
