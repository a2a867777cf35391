"""The addresses of the Spaces' apps: what *.hf.space is to the real Hub, here a loopback port for each Space.

A visit wakes a Space that sleeps. While its app does not run, the visitor gets a page with status 503;
whoever may not see a private Space gets 404. How the real proxy words and numbers these answers is not
proven.
"""

import httpx
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .errors import HubError
from .spaces import SpaceState
from .store import Hub

RUNNING = ("RUNNING", "RUNNING_BUILDING", "RUNNING_APP_STARTING")
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "date"}


class Doors:
    """An ASGI app for the requests that come to the Spaces' ports."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.client = httpx.AsyncClient(timeout=None, trust_env=False)

    def space_at(self, scope: Scope) -> SpaceState | None:
        """The Space whose port this is; None where it has none yet, or no longer."""
        url = "http://{}:{}".format(*scope["server"])
        return next((space for space in self.hub.spaces.values() if space.door == url), None)

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
            return _page(502, "The test has put no process behind this Space")
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
            return _page(502, "The process behind this Space does not answer")
        passed = {key: value for key, value in answer.headers.items() if key not in HOP_BY_HOP}
        return StreamingResponse(
            answer.aiter_raw(), answer.status_code, passed, background=BackgroundTask(answer.aclose)
        )


def _query(request: Request) -> bytes:
    return b"?" + request.scope["query_string"] if request.scope["query_string"] else b""


def _page(status: int, text: str) -> HTMLResponse:
    return HTMLResponse(f"<!DOCTYPE html><title>{text}</title>", status)
