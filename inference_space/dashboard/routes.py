"""The views beside the live page, each a piece of HTML that the page asks for when it is opened."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
from markupsafe import Markup
from starlette.background import BackgroundTask

from delta_weight_sync.codec import CodecError
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.store import BucketError
from inference_space.dashboard import browser
from inference_space.dashboard.data import RunCache
from inference_space.dashboard.facts import scene
from inference_space.dashboard.inside import inside
from inference_space.dashboard.library import Library
from inference_space.dashboard.page import body
from inference_space.dashboard.rations import RationedError
from inference_space.dashboard.snapshots import FRAMES
from inference_space.dashboard.view import Progress

_LAST_PAGE = 1_000_000
_FAULTS = (BucketError, ProtocolError, CodecError)


def router(cache: RunCache, library: Library) -> APIRouter:
    """`GET dashboard/...`; whatever is wrong with the run is a sentence with status 404, or 429."""
    routes = APIRouter(prefix="/dashboard")

    @routes.get("/frame")
    def frame(version: int) -> Response:
        """The live page as it was at a moment of the run."""
        return _page(lambda: _body(cache.snapshots.at(version, library.digests)))

    @routes.get("/inside")
    def inside_a_delta(version: int) -> Response:
        """Where a version's changes are."""
        return _page(lambda: inside(library.delta(version)[1]))

    @routes.get("/bucket")
    def bucket(page: int = 0) -> Response:
        """The objects of the run."""
        shown = min(max(0, page), _LAST_PAGE)
        return _page(lambda: browser.listing(library.objects(), library.run, shown, served=True))

    @routes.get("/delta")
    def delta(version: int) -> Response:
        """A delta, opened in place."""
        return _page(lambda: browser.opened(*library.delta(version), served=True))

    @routes.get("/verify")
    def verify(version: int) -> Response:
        """Whether a version's files give its digest."""
        return _page(lambda: Markup('<b class="yes">verified</b>: {}').format(library.verify(version)))

    @routes.get("/explain")
    def explain() -> JSONResponse:
        """The numbers of the animations."""
        now = cache.view()
        return JSONResponse(scene(now.progress, now.model))

    routes.add_api_route("/object", _download(library), methods=["GET"])
    return routes


@lru_cache(maxsize=FRAMES)
def _body(run: Progress) -> str:
    return body(run)


def _download(library: Library) -> Callable[[str], Response]:
    def download(key: str) -> Response:
        """One object of the run, as it is."""
        folder = tempfile.TemporaryDirectory()
        try:
            path = library.fetch(key, Path(folder.name))
        except _FAULTS as error:
            folder.cleanup()
            return _fault(error)
        return FileResponse(path, filename=path.name, background=BackgroundTask(folder.cleanup))

    return download


def _page(work: Callable[[], str]) -> Response:
    try:
        return HTMLResponse(work())
    except _FAULTS as error:
        return _fault(error)


def _fault(error: Exception) -> Response:
    return PlainTextResponse(str(error), 429 if isinstance(error, RationedError) else 404)
