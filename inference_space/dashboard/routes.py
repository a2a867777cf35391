"""The dashboard as part of a FastAPI app: the page, and the routes of its views."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import gradio as gr
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
from markupsafe import Markup
from starlette.background import BackgroundTask

from delta_weight_sync.errors import BucketError, CodecError, ProtocolError
from delta_weight_sync.store import Bucket
from inference_space.dashboard import views
from inference_space.dashboard.data import Library, RateLimitedBucket, RateLimitError, RunCache, Status
from inference_space.dashboard.owner import Owner, space_author
from inference_space.dashboard.page import Prerender, body, build, first_paint, insert
from inference_space.dashboard.state import FRAMES

if TYPE_CHECKING:
    from delta_weight_sync.vllm.follower import Commands as Controls

_SESSIONS = 512  # whose last revision is remembered; a forgotten one is sent the page once more
_LAST_PAGE = 1_000_000


def mount(
    app: FastAPI,
    bucket: Bucket,
    run: str | None,
    *,
    controls: Controls | None = None,
    key: str = "",
    own_status: Status | None = None,
) -> FastAPI:
    """Serve the dashboard of `run`, or of the run created last, at the root of `app`.

    Mount it after the app's own routes: it answers every path that no earlier route takes. Reading the bucket
    begins immediately. `app.state.dashboard_events` describes the inputs of the page's events.

    Args:
        controls: Of the replica that hosts the dashboard; they add a tab for its owner.
        key: Opens the controls, as does a login as the Space's author.
        own_status: Returns the present status of the replica that hosts the dashboard.

    Raises:
        ValueError: This version of Gradio has a different page.
    """
    insert((Path(gr.__file__).parent / "templates/frontend/index.html").read_text(), "")
    cache, owner = RunCache(bucket, run, own_status=own_status), Owner(key, space_author())
    if not (owner.key or owner.name):
        controls = None  # without an owner the tab is useless
    library = Library(cast(Bucket, RateLimitedBucket(bucket)), lambda: cache.view().run)
    add_views(app, cache, library)
    app.add_middleware(Prerender, cache.now, lambda view: first_paint(view, owner=controls is not None))
    blocks = build(cache.view, controls, owner)
    blocks.state_session_capacity = _SESSIONS
    kinds: dict[type, str] = {gr.Textbox: "text", gr.Number: "number"}
    app.state.dashboard_events = {
        number: [kinds.get(type(given), "kept") for given in event.inputs]
        for number, event in blocks.fns.items()
        if event.fn is not None
    }
    mounted: FastAPI = gr.mount_gradio_app(
        app,
        blocks,
        "/",
        theme=gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        max_file_size=1,  # there is nothing to upload
    )
    return mounted


def add_views(app: FastAPI, cache: RunCache, library: Library) -> None:
    """Add the routes `GET /dashboard/...`. A fault of the run is a sentence with status 404, or 429."""
    routes = APIRouter(prefix="/dashboard", default_response_class=HTMLResponse)
    past = lru_cache(maxsize=FRAMES)(body)

    @routes.get("/frame")
    def frame(version: int) -> str:
        return past(cache.at(version, library.digests))

    @routes.get("/inside")
    def inside(version: int) -> str:
        return views.inside(library.delta(version)[1])

    @routes.get("/bucket")
    def bucket(page: int = 0) -> str:
        page = min(max(0, page), _LAST_PAGE)
        return views.listing(library.objects(), library.run, page, served=True)

    @routes.get("/delta")
    def delta(version: int) -> str:
        return views.opened(*library.delta(version), served=True)

    @routes.get("/verify")
    def verify(version: int) -> str:
        return Markup('<b class="yes">verified</b>: {}').format(library.verify(version))

    @routes.get("/explain")
    def explain() -> JSONResponse:
        now = cache.view()
        return JSONResponse(views.scene(now.progress, now.model))

    @routes.get("/object")
    def download(key: str) -> FileResponse:
        found = library.download(key)
        # The task holds the download, and so its file, until it is sent.
        return FileResponse(found.path, filename=found.path.name, background=BackgroundTask(id, found))

    def sentence(_: Request, fault: Exception) -> PlainTextResponse:
        return PlainTextResponse(str(fault), 429 if isinstance(fault, RateLimitError) else 404)

    app.include_router(routes)
    for kind in (BucketError, ProtocolError, CodecError):
        app.add_exception_handler(kind, sentence)
