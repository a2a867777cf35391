"""The Hub's endpoints that only Spaces have, as huggingface_hub calls them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, Request
from fastapi.responses import StreamingResponse

from .creation import check_plan, create, url_path
from .errors import HubError
from .hardware import catalogue
from .spaces import SpaceState
from .store import Hub

Auth = Annotated[str | None, Header()]
API = "/api/spaces/{owner}/{name}"


def space_routes(hub: Hub) -> APIRouter:
    """Routes that only Spaces have."""

    def read(owner: str, name: str, authorization: Auth = None) -> SpaceState:
        return hub.space(f"{owner}/{name}", authorization)

    def write(owner: str, name: str, authorization: Auth = None) -> SpaceState:
        return hub.space(f"{owner}/{name}", authorization, write=True)

    reader, writer = Annotated[SpaceState, Depends(read)], Annotated[SpaceState, Depends(write)]
    routes = APIRouter()
    _stage_routes(routes, reader, writer)
    _hardware_routes(routes, hub, writer)
    _setting_routes(routes, reader, writer)
    _log_routes(routes, writer)
    _volume_routes(routes, writer)
    _duplicate_routes(routes, hub, reader)
    return routes


def _stage_routes(routes: APIRouter, reader: Any, writer: Any) -> None:
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


def _hardware_routes(routes: APIRouter, hub: Hub, writer: Any) -> None:
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


def _setting_routes(routes: APIRouter, reader: Any, writer: Any) -> None:
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


def _volume_routes(routes: APIRouter, writer: Any) -> None:
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


def _log_routes(routes: APIRouter, writer: Any) -> None:
    @routes.get(API + "/logs/{kind}")
    async def logs(space: writer, kind: str) -> StreamingResponse:
        return StreamingResponse(_events(space, kind), media_type="text/event-stream")


async def _events(space: SpaceState, kind: str) -> AsyncIterator[str]:
    """The log so far and, while the test holds it open, what comes; the real Hub holds it open for ever."""
    sent = 0
    while True:
        for event in space.logs[kind][sent:]:
            yield f"data: {json.dumps(event)}\n\n"
            sent += 1
        if not space.live_logs:
            return
        await asyncio.sleep(0.05)


def _duplicate_routes(routes: APIRouter, hub: Hub, reader: Any) -> None:
    @routes.post(API + "/duplicate")
    async def duplicate(
        space: reader, wish: dict[str, Any], request: Request, authorization: Auth = None
    ) -> dict[str, Any]:
        made = copy_space(hub, space, wish, authorization)
        return {"url": f"{request.base_url}{url_path('spaces', made.id)}", "filesCopyPending": False}


def copy_space(hub: Hub, source: SpaceState, wish: dict[str, Any], who: str | None) -> SpaceState:
    """Files and variables come along, secrets do not, and the hardware is free unless asked for."""
    copied = [{"key": one.key, "value": one.value} for one in source.variables.values()]
    variables = [*copied, *(wish.get("variables") or [])]
    wish = {"visibility": source.repo.visibility, **wish, "sdk": source.sdk, "variables": variables}
    repo = create(hub, "spaces", wish["repository"], wish, who)
    repo.commit(f"Duplicate from {source.id}", dict(source.repo.files))
    hub.spaces[repo.id].build()
    return hub.spaces[repo.id]
