"""The Hub's endpoints that only Spaces have, as huggingface_hub calls them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

import httpx
from fastapi import APIRouter, Body, Depends, Header
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .common import HubError
from .spaces import SpaceState, catalogue
from .store import Hub, check_plan, create, url_path

Auth = Annotated[str | None, Header()]
API = "/api/spaces/{owner}/{name}"


def space_routes(hub: Hub) -> APIRouter:
    def read(owner: str, name: str, authorization: Auth = None) -> SpaceState:
        return hub.space(f"{owner}/{name}", authorization)

    def write(owner: str, name: str, authorization: Auth = None) -> SpaceState:
        return hub.space(f"{owner}/{name}", authorization, write=True)

    reader, writer = Annotated[SpaceState, Depends(read)], Annotated[SpaceState, Depends(write)]
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

    @routes.post(API + "/dev-mode")
    async def dev_mode(space: writer, wish: dict[str, Any]) -> dict[str, Any]:
        space.dev_mode = wish["enabled"]
        return space.runtime()

    @routes.get("/api/spaces/hardware")
    async def offered() -> list[dict[str, Any]]:
        return catalogue()

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

    """Variables, which every reader of the Space sees, and secrets, whose names only a writer does."""

    readers = {"variables": reader, "secrets": writer}

    def shown(space: SpaceState, kind: str) -> dict[str, Any]:
        return {key: one.to_json(secret=kind == "secrets") for key, one in getattr(space, kind).items()}

    def add(kind: str) -> None:
        @routes.get(f"{API}/{kind}")
        async def read(space: readers[kind]) -> dict[str, Any]:
            return shown(space, kind)

        @routes.post(f"{API}/{kind}")
        async def put(space: writer, wish: dict[str, Any]) -> dict[str, Any]:
            space.set(kind, wish["key"], wish["value"], wish.get("description"))
            return shown(space, kind)

        @routes.delete(f"{API}/{kind}")
        async def delete(space: writer, wish: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
            space.unset(kind, wish["key"])
            return shown(space, kind)

    add("variables")
    add("secrets")

    @routes.get(API + "/logs/{kind}")
    async def logs(space: writer, kind: str) -> StreamingResponse:
        return StreamingResponse(_events(space, kind), media_type="text/event-stream")

    @routes.put(API + "/volumes")
    async def put(space: writer, wish: dict[str, Any]) -> None:
        space.volumes = wish["volumes"]
        space.start()

    @routes.delete(API + "/volumes")
    async def delete(space: writer) -> None:
        if not space.volumes:
            raise HubError(400, "This Space has no volumes")
        space.volumes = []
        space.start()

    @routes.post(API + "/duplicate")
    async def duplicate(
        space: reader, wish: dict[str, Any], request: Request, authorization: Auth = None
    ) -> dict[str, Any]:
        made = copy_space(hub, space, wish, authorization)
        return {"url": f"{request.base_url}{url_path('spaces', made.id)}", "filesCopyPending": False}

    return routes


async def _events(space: SpaceState, kind: str) -> AsyncIterator[str]:
    """The log so far, and new lines while the test keeps the stream open, as the real Hub always does."""
    sent = 0
    while True:
        for event in space.logs[kind][sent:]:
            yield f"data: {json.dumps(event)}\n\n"
            sent += 1
        if not space.live_logs:
            return
        await asyncio.sleep(0.05)


def copy_space(hub: Hub, source: SpaceState, wish: dict[str, Any], who: str | None) -> SpaceState:
    """Files and variables come along, secrets do not, and the hardware is free unless asked for."""
    copied = [{"key": one.key, "value": one.value} for one in source.variables.values()]
    variables = [*copied, *(wish.get("variables") or [])]
    wish = {"visibility": source.repo.visibility, **wish, "sdk": source.sdk, "variables": variables}
    repo = create(hub, "spaces", wish["repository"], wish, who)
    repo.commit(f"Duplicate from {source.id}", dict(source.repo.files))
    hub.spaces[repo.id].build()
    return hub.spaces[repo.id]


RUNNING = ("RUNNING", "RUNNING_BUILDING", "RUNNING_APP_STARTING")
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "date"}


class AppProxy:
    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.client = httpx.AsyncClient(timeout=None, trust_env=False)

    def space_at(self, scope: Scope) -> SpaceState | None:
        """The Space whose port this is; None where it has none yet, or no longer."""
        url = "http://{}:{}".format(*scope["server"])
        return next((space for space in self.hub.spaces.values() if space.address == url), None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await (await self._answer(request))(scope, receive, send)

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
        url = httpx.URL(upstream).copy_with(raw_path=request.scope["raw_path"] + _query(request))
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


def _query(request: Request) -> bytes:
    return b"?" + request.scope["query_string"] if request.scope["query_string"] else b""


def _page(status: int, text: str) -> HTMLResponse:
    return HTMLResponse(f"<!DOCTYPE html><title>{text}</title>", status)
