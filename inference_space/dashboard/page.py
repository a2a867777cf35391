"""The dashboard as part of a FastAPI app: its page, the owner's tab, and the routes of the other tabs.

Gradio's page is empty until its scripts have run. So `prerendered` inserts styles, scripts and the rendered
run into that page; `static/prerender.js` removes the inserted run when Gradio shows its own copy.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import hmac
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import gradio as gr
import httpx
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
from gradio.utils import get_space
from markupsafe import Markup
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from delta_weight_sync import badge
from delta_weight_sync.errors import BucketError, DeltaWeightSyncError
from delta_weight_sync.store import Bucket
from delta_weight_sync.util import Guard
from inference_space.dashboard import data, views
from inference_space.dashboard.calls import check_calls
from inference_space.dashboard.charts import charts, metric_charts, score_charts, timeline
from inference_space.dashboard.html import STATIC, render_template, scripts, styles
from inference_space.dashboard.state import FRAMES, Progress, moments
from space_guard.guard import FRAMING

if TYPE_CHECKING:  # the dashboard also runs without a replica
    from delta_weight_sync.vllm.follower import Commands as Controls

# Gradio writes the request's host name into its page. `prerendered` requests the page under this name,
# and replaces the name by `location.origin`.
_NAME = "dashboard.invalid"
_SESSIONS = 512  # open pages that Gradio remembers; all others get the run each second, changed or not

# Set by the Hub in a Space whose README says `hf_oauth: true`; Gradio reads all four.
_LOGIN_SETTINGS = ("OAUTH_CLIENT_ID", "OAUTH_CLIENT_SECRET", "OAUTH_SCOPES", "OPENID_PROVIDER_URL")
_REFUSED = "Only the owner may do this: enter the replica's key (REPLICA_KEY), or log in as the owner."


@dataclass(frozen=True)
class Owner:
    """The clients that may use the controls: those with the key, and the Hugging Face account `name`."""

    key: str = ""
    name: str = ""

    def allows(self, key: str, login: str) -> bool:
        """Whether the key or the login is the owner's. An empty key or login does not count."""
        pairs = (key, self.key), (login, self.name)
        return any(own and hmac.compare_digest(given.encode(), own.encode()) for given, own in pairs)


def login_problem() -> str:
    """Return why visitors cannot log in here, and the fix; empty if they can. Outside of a Space, Gradio
    would log every visitor in as this machine's account."""
    if not os.environ.get("SPACE_ID"):
        return "Login with Hugging Face works only in a Space."
    if get_space() is None:  # Gradio's own condition
        return "To log in with Hugging Face, set SYSTEM=spaces in the Space's Dockerfile."
    if not all(os.environ.get(name) for name in _LOGIN_SETTINGS):
        return "To log in with Hugging Face, set hf_oauth: true at the top of the Space's README.md."
    return ""


def owner_tab(controls: Controls, owner: Owner) -> None:
    """Add the components of the owner's tab to the Blocks that are being built."""

    def pin(version: str) -> None:
        wanted = version.strip()
        if not wanted:
            raise ValueError("Enter the version to pin: a whole number, 0 or larger, or a tag.")
        controls.pin(int(wanted) if wanted.isdecimal() else wanted)

    gr.HTML("<h1>This replica</h1>", apply_default_css=False)
    state = gr.HTML(lambda: describe(controls), elem_id="dws-owner-state", apply_default_css=False)
    if owner.name:
        gr.LoginButton(size="md", icon=None)
    else:
        gr.HTML(Markup('<p class="mute">{}</p>').format(login_problem()), apply_default_css=False)
    key = gr.Textbox(label="Key", type="password", visible=bool(owner.key), elem_id="dws-key")
    with gr.Row():
        acts = {
            gr.Button("Pause following"): lambda _: controls.pause(),
            gr.Button("Follow the newest"): lambda _: controls.resume(),
            gr.Button("Heal"): lambda _: controls.heal(),
        }
    with gr.Row():
        version = gr.Textbox(label="Version")  # a gr.Number would log a traceback for text
        acts[gr.Button("Pin this version")] = pin
    answer = gr.HTML("", elem_id="dws-owner-answer", apply_default_css=False)
    gr.HTML(render_template("actions.html"), apply_default_css=False)
    for button, act in acts.items():
        button.click(guarded(controls, owner, act), [key, version], [state, answer], show_progress="hidden")


def describe(controls: Controls) -> Markup:
    return render_template("following.html", controls=controls)


def guarded(controls: Controls, owner: Owner, act: Callable[[str], None]) -> Callable[..., tuple[str, str]]:
    """Make a handler that calls `act` for the owner only. The handler returns the state and any refusal."""

    # Gradio fills in the profile from its signed session; a visitor cannot send a profile.
    def run(key: str | None, version: str | None, profile: gr.OAuthProfile | None) -> tuple[str, str]:
        refused = ""
        try:
            if not owner.allows(key or "", profile.username if profile else ""):
                raise ValueError(_REFUSED)
            act(version or "")
        except (ValueError, BucketError) as error:
            refused = Markup('<p class="alert" role="alert">{}</p>').format(error)
        return describe(controls), refused

    return run


def build(view: Callable[[], data.RunView], controls: Controls | None, owner: Owner) -> gr.Blocks:
    """Build the dashboard. Each open page calls `view` once a second. `controls` add the owner's tab."""

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
        html(render_template("views.html"))
        if controls:
            with gr.Column(elem_classes=["view", "view-owner"]):
                owner_tab(controls, owner)
        gr.on([blocks.load, gr.Timer(data.EVERY_S).tick], tick, seen, [page, seen], show_progress="hidden")
    for event in blocks.fns.values():
        event.queue = False  # each call is short, and a queue would be one more route to guard
        event.api_visibility = "private"  # otherwise the page documents an API, with the server's name
    return blocks


@lru_cache(maxsize=2)
def render(view: data.RunView) -> Markup:
    """Render the page of a view, once for all its viewers."""
    run = view.progress
    return render_template(
        "page.html",
        view=view,
        run=run,
        measured=views.facts_of(run, view.model) is not None,
        moments=moments(run.version) if run else [],
        body=body(run, view if view.start else None, view.other) if run else "",
    )


def body(
    run: Progress, view: data.RunView | None = None, other: tuple[str, Progress] | None = None
) -> Markup:
    """Render a run's figures and curves.

    Args:
        run: What is known of the run.
        view: Given if the run has no step yet: in place of the curves, the page shows `view.start`.
        other: Name and progress of a run to compare. Its curves are drawn, too.
    """
    (syncs, axis) = timeline(run)
    name, progress = other or ("", None)
    drawn = {
        "charts": charts(run, progress),
        "scores": score_charts(run, progress),
        "metrics": metric_charts(run, progress),
    }
    return render_template("run.html", run=run, **drawn, other=name, syncs=syncs, axis=axis, view=view)


def first_paint(view: data.RunView, *, owner: bool) -> Markup:
    """Render what a browser shows before Gradio's scripts have run. An empty box holds the slider's place."""
    return render_template("prerender.html", page=render(view), owner=owner, run=view.progress)


def prerendered(app: ASGIApp, view: Callable[[], data.RunView], *, owner: bool) -> ASGIApp:
    """ASGI middleware: serves the page, and renders it once for each revision of the view."""
    gradio_page = policy = ""
    newest = (-1, b"", b"")  # revision, page, compressed page
    making = asyncio.Lock()

    def make(now: data.RunView) -> tuple[int, bytes, bytes]:
        page = insert(gradio_page, first_paint(now, owner=owner)).encode()
        return now.revision, page, gzip.compress(page, 6)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal gradio_page, policy, newest
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] not in ("GET", "HEAD"):
            return await app(scope, receive, send)
        async with making:
            now = view()
            if not policy:
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(transport=transport, base_url=f"http://{_NAME}") as http:
                    gradio_page = (await http.get("/")).text.replace(f'"http://{_NAME}"', "location.origin")
                policy = content_policy(insert(gradio_page, ""))
            if newest[0] != now.revision:
                newest = await asyncio.to_thread(make, now)
            _, page, zipped = newest
        headers = {"vary": "accept-encoding", "content-security-policy": policy}
        if "gzip" in Headers(scope=scope).get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            page = zipped
        return await Response(page, headers=headers, media_type="text/html")(scope, receive, send)

    return answer


def insert(page: str, painted: str) -> str:
    """Insert styles, scripts and a first paint into Gradio's page. An unknown page raises `ValueError`."""
    head, closed, rest = page.partition("</head>")
    before, opened, after = rest.partition("<gradio-app")
    if not (closed and opened) or _NAME in page:
        raise ValueError("Gradio's page is not the one that the dashboard was built for: use gradio==6.31.0")
    ours = f"{painted}<script>{(STATIC / 'prerender.js').read_text()}</script><script>{scripts()}</script>"
    return f"{head}<style>{styles()}</style>{closed}{before}{ours}{opened}{after}"


def content_policy(page: str) -> str:
    """Return a policy that allows the scripts in `page`, and requests to this server only.

    `page` must hold no data of a run, or a script in that data would be allowed. Gradio compiles its
    templates in the browser, which needs `unsafe-eval`.
    """
    inline = re.findall(r"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", page, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline}
    known = " ".join(f"'sha256-{digest}'" for digest in sorted(hashes))
    return (
        f"default-src 'self'; script-src 'self' 'unsafe-eval' {known}; style-src 'self' 'unsafe-inline';"
        f" img-src 'self' data:; font-src 'self' data:; object-src 'none'; base-uri 'self'; {FRAMING}"
    )


def mount(
    app: FastAPI,
    bucket: Bucket,
    run: str | None,
    *,
    controls: Controls | None = None,
    key: str = "",
    reports: Sequence[data.Report] = (),
    compare: str = "",
) -> FastAPI:
    """Serve the dashboard of `run`, or of the run created last, at the root of `app`.

    Mount the dashboard after the app's own routes, because it answers every other path.

    Args:
        controls: The commands of the replica that hosts the dashboard; they add a tab for its owner.
        key: Opens the controls. So does a login as the Space's author.
        reports: Each returns the report of a replica, such as the one that hosts the dashboard.
        compare: Another run of the bucket, whose curves are drawn, too.

    Raises:
        ValueError: The installed Gradio has a different page.
    """
    # If the installed Gradio does not fit, fail now instead of at the first request.
    insert((Path(gr.__file__).parent / "templates/frontend/index.html").read_text(), "")
    cache = data.RunCache(bucket, run, reports=reports, compare=compare)
    owner = Owner(key, "" if login_problem() else os.environ.get("SPACE_AUTHOR_NAME", ""))
    if not (owner.key or owner.name):
        controls = None  # without an owner the tab is useless
    library = data.Library(cast(Bucket, data.RateLimitedBucket(bucket)), lambda: cache.view().run)
    add_views(app, cache, library)
    app.add_middleware(prerendered, view=cache.view, owner=controls is not None)
    blocks = build(cache.view, controls, owner)
    blocks.state_session_capacity = _SESSIONS
    app.add_middleware(
        check_calls, events={n: len(event.inputs) for n, event in blocks.fns.items() if event.fn}
    )
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


def badge_of(view: data.RunView) -> str:
    """The badge of a run: the newest version that a replica serves with the published digest; without such a
    replica, the newest version, not verified."""
    run = view.progress
    name = view.run or "Delta Weight Sync"
    if run is None:
        return badge.draw(name, "not readable" if view.problem else "no version yet", "unknown")
    served = [(run.matches(replica.status), replica.status.version) for replica in run.replicas]
    proven = [version for matches, version in served if matches and version is not None]
    wrong = [version for matches, version in served if matches is False and version is not None]
    if wrong:
        return badge.of_version(name, max(wrong), "bad")
    return badge.of_version(name, max(proven, default=run.version), "good" if proven else "unknown")


def add_views(app: FastAPI, cache: data.RunCache, library: data.Library) -> None:
    """Add the routes `GET /dashboard/...`, and the badge. The former report errors as text: 429 for the rate
    limit, else 404."""
    routes = APIRouter(prefix="/dashboard", default_response_class=HTMLResponse)
    guard = Guard("the badge")

    @lru_cache(maxsize=FRAMES)
    def past(run: Progress) -> Markup:
        return body(run, other=cache.view().other)

    @routes.get("/frame")
    def frame(version: int) -> str:
        return past(cache.state.at(version, library.digests))

    @routes.get("/inside")
    def inside(version: int) -> str:
        return views.inside(library.delta(version)[1])

    @routes.get("/bucket")
    def bucket(page: int = 0) -> str:
        return views.listing(library.objects(), library.run, page)

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
        # `found` deletes its file when it is freed; the task keeps `found` until the file is sent.
        return FileResponse(found.path, filename=found.path.name, background=BackgroundTask(id, found))

    @app.get("/badge.svg")
    def badge_picture() -> Response:
        """A picture for pages elsewhere, such as model cards. It says so if something fails."""
        picture = badge.draw("Delta Weight Sync", "not readable", "unknown")
        with guard:
            picture = badge_of(cache.view())
        headers = {"cache-control": "public, max-age=60"}
        return Response(picture, media_type="image/svg+xml", headers=headers)

    def sentence(_: Request, fault: Exception) -> PlainTextResponse:
        return PlainTextResponse(str(fault), 429 if isinstance(fault, data.RateLimitError) else 404)

    app.include_router(routes)
    app.add_exception_handler(DeltaWeightSyncError, sentence)
