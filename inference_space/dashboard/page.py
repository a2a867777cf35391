"""The page: one HTML component that Gradio updates with the run, the other views, and the first paint.

Gradio's page is empty until its scripts have been fetched and run. So `Prerender` inserts styles, scripts and
the rendered run into it; `static/prerender.js` removes that run when Gradio shows it itself.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import gradio as gr
import httpx
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from inference_space.dashboard.charts import charts, timeline
from inference_space.dashboard.data import EVERY_S, RunView
from inference_space.dashboard.html import STATIC, render_template, scripts, styles
from inference_space.dashboard.owner import Owner, owner_tab
from inference_space.dashboard.state import LATELY, Progress, moments
from inference_space.dashboard.views import facts_of, learned
from space_guard.requests import FRAMING

if TYPE_CHECKING:
    from delta_weight_sync.vllm.follower import Commands as Controls

# Gradio writes the host name of the request into its page; the browser knows it anyway.
_NAME = "dashboard.invalid"


def build(
    view: Callable[[], RunView], controls: Controls | None = None, owner: Owner | None = None
) -> gr.Blocks:
    """Build the dashboard, which calls `view` once a second per open page; `controls` add the owner's tab."""

    def tick(seen: int) -> tuple[Any, Any]:
        now = view()
        return (gr.skip(), gr.skip()) if now.revision == seen else (render(now), now.revision)

    def html(content: str, **options: Any) -> gr.HTML:
        return gr.HTML(content, apply_default_css=False, js_on_load=None, **options)

    blocks: gr.Blocks
    with (
        gr.Blocks(title="Delta Weight Sync", analytics_enabled=False, fill_width=True) as blocks,
        gr.Column(elem_id="dws"),
    ):
        seen = gr.State(-1)
        html(render_template("navigation.html", owner=controls is not None))
        page = html("", elem_id="dws-live", elem_classes=["view", "view-run"])
        html(render_template("views.html", learned=learned()))
        if controls:
            with gr.Column(elem_classes=["view", "view-owner"]):
                owner_tab(controls, owner or Owner())
        events = [blocks.load, gr.Timer(EVERY_S).tick]
        gr.on(events, tick, seen, [page, seen], show_progress="hidden", api_visibility="private")
    for event in blocks.fns.values():
        event.queue = False  # each is one short call: without a queue there is one route less to guard
        event.api_visibility = "private"  # or the page would explain how to call it, with the server's name
    return blocks


@lru_cache(maxsize=2)
def render(view: RunView) -> Markup:
    """Render the page of a view, once for all its viewers."""
    run = view.progress
    return render_template(
        "page.html",
        view=view,
        run=run,
        measured=facts_of(run, view.model) is not None,
        moments=moments(run.version) if run else [],
        body=body(run) if run else "",
    )


def body(run: Progress) -> Markup:
    """Render everything shown of a run, now or as it was."""
    return render_template("run.html", run=run, lately=LATELY, charts=charts(run), timeline=timeline(run))


def first_paint(view: RunView, *, owner: bool) -> Markup:
    """Render what a browser shows before Gradio's scripts have run; it leaves room for the slider."""
    slider = view.progress is not None and view.progress.version > 1
    return render_template("prerender.html", page=render(view), owner=owner, slider=slider)


class Prerender:
    """ASGI middleware that answers for the page itself, and makes it once for each revision of the view."""

    def __init__(self, app: ASGIApp, view: Callable[[], RunView], paint: Callable[[RunView], str]) -> None:
        """`view` returns what to show, without waiting; `paint` renders its first paint."""
        self._app, self._view, self._paint = app, view, paint
        self._gradio_page: str | None = None
        self._newest: tuple[int, bytes, bytes] = (-1, b"", b"")  # revision, page, compressed page
        self._policy = ""
        self._making = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the page, or pass the request on."""
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] not in ("GET", "HEAD"):
            return await self._app(scope, receive, send)
        async with self._making:
            view = self._view()
            if self._gradio_page is None:
                self._gradio_page = await _gradio_page(self._app)
                self._policy = content_policy(insert(self._gradio_page, ""))
            if self._newest[0] != view.revision:
                self._newest = await run_in_threadpool(self._make, self._gradio_page, view)
            _, page, zipped = self._newest
        headers = {"vary": "accept-encoding", "content-security-policy": self._policy}
        if "gzip" in Headers(scope=scope).get("accept-encoding", ""):
            headers["content-encoding"], page = "gzip", zipped
        return await Response(page, headers=headers, media_type="text/html")(scope, receive, send)

    def _make(self, gradio_page: str, view: RunView) -> tuple[int, bytes, bytes]:
        page = insert(gradio_page, self._paint(view)).encode()
        return view.revision, page, gzip.compress(page, 6)


async def _gradio_page(app: ASGIApp) -> str:
    """Return Gradio's page, free of the name by which it was requested."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{_NAME}") as http:
        page = (await http.get("/")).text.replace(f'"http://{_NAME}"', "location.origin")
    insert(page, "")
    return page


def insert(page: str, painted: str) -> str:
    """Insert styles, scripts and a first paint into Gradio's page; raises `ValueError` for any other page."""
    head, closed, rest = page.partition("</head>")
    before, opened, after = rest.partition("<gradio-app")
    if not (closed and opened) or _NAME in page:
        raise ValueError("Gradio's page is not the one that the dashboard was built for: use gradio==6.31.0")
    first = (STATIC / "prerender.js").read_text()
    ours = f"{painted}<script>{first}</script><script>{scripts()}</script>"
    return f"{head}<style>{styles()}</style>{closed}{before}{ours}{opened}{after}"


def content_policy(page: str) -> str:
    """Return the page's content security policy: its own scripts, and requests to this server only.

    `page` must hold nothing of a run, so that a script in a run's data is not allowed. Gradio compiles its
    templates in the browser, which needs `unsafe-eval`.
    """
    inline = re.findall(r"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", page, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline}
    known = " ".join(f"'sha256-{digest}'" for digest in sorted(hashes))
    return (
        f"default-src 'self'; script-src 'self' 'unsafe-eval' {known}; style-src 'self' 'unsafe-inline';"
        f" img-src 'self' data:; font-src 'self' data:; object-src 'none'; base-uri 'self'; {FRAMING}"
    )
