"""The dashboard as part of a FastAPI app."""

from __future__ import annotations

import os

import gradio as gr
from fastapi import FastAPI

from inference_space.dashboard.controls import Controls, Owner
from inference_space.dashboard.data import RunCache
from inference_space.dashboard.library import Library
from inference_space.dashboard.page import HEAD, build
from inference_space.dashboard.routes import router
from shared.bucket import Bucket


def mount(
    app: FastAPI,
    bucket: Bucket,
    run: str | None,
    path: str = "/",
    *,
    controls: Controls | None = None,
    key: str = "",
) -> FastAPI:
    """Serve the dashboard of `run` (None: the run created last) at `path` of `app`; returns `app`.

    Mount it after the app's own routes: at "/" it answers every path that no earlier route took. With
    `controls` there is a tab for the owner: whoever gives `key`, or logs in as the Space's author.
    """
    view = RunCache(bucket, run).view
    app.include_router(router(view, Library(bucket, lambda: view().run)), prefix=path.rstrip("/"))
    owner = Owner(key, os.environ.get("SPACE_AUTHOR_NAME", ""))
    return gr.mount_gradio_app(
        app,
        build(view, controls, owner),
        path,
        head=HEAD,
        theme=gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        max_file_size=1,  # nobody has anything to upload here
    )
