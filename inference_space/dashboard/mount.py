"""The dashboard as part of a FastAPI app."""

from __future__ import annotations

from pathlib import Path

import gradio as gr
from fastapi import FastAPI

from delta_weight_sync.store import Bucket
from inference_space.dashboard import login
from inference_space.dashboard.controls import Controls, Owner
from inference_space.dashboard.data import RunCache
from inference_space.dashboard.library import Library
from inference_space.dashboard.page import build, paint
from inference_space.dashboard.prerender import Prerender, put_into
from inference_space.dashboard.rations import Rationed
from inference_space.dashboard.routes import router

SESSIONS = 512  # whose last revision is remembered; one that is forgotten is sent the page once more


def mount(
    app: FastAPI,
    bucket: Bucket,
    run: str | None,
    *,
    controls: Controls | None = None,
    key: str = "",
) -> FastAPI:
    """Serve the dashboard of `run` (None: the run created last) at the root of `app`; returns `app`.

    Mount it after the app's own routes: it answers every path that no earlier route took. With `controls`
    there is a tab for the owner: whoever gives `key`, or logs in as the Space's author. Reading the bucket
    begins at once. `app.state.dashboard_events` is what its events take. Raises `ValueError` if this
    Gradio's page is not the one we know.
    """
    put_into((Path(gr.__file__).parent / "templates/frontend/index.html").read_text(), "")
    cache, owner = RunCache(bucket, run), Owner(key, login.author())
    if not (owner.key or owner.name):
        controls = None  # nobody could use them
    library = Library(Rationed(bucket), lambda: cache.view().run)
    app.include_router(router(cache, library))
    app.add_middleware(Prerender, cache.now, lambda view: paint(view, owner=controls is not None))
    blocks = build(cache.view, controls, owner)
    blocks.state_session_capacity = SESSIONS
    app.state.dashboard_events = _events(blocks)
    return gr.mount_gradio_app(
        app,
        blocks,
        "/",
        theme=gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        max_file_size=1,  # nobody has anything to upload here
    )


def _events(blocks: gr.Blocks) -> dict[int, list[str]]:
    """Number -> kinds of its inputs, of each event that the page sends."""
    sent = ((number, event) for number, event in blocks.fns.items() if event.fn is not None)
    return {number: [_KINDS.get(type(given), "kept") for given in event.inputs] for number, event in sent}


_KINDS = {gr.Textbox: "text", gr.Number: "number"}
