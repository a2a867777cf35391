"""The dashboard as part of a FastAPI app."""

from __future__ import annotations

import gradio as gr
from fastapi import FastAPI

from inference_space.dashboard.data import RunCache
from inference_space.dashboard.page import STYLE, build
from shared.bucket import Bucket


def mount(app: FastAPI, bucket: Bucket, run: str | None, path: str = "/") -> FastAPI:
    """Serve the dashboard of `run` (None: the run created last) at `path` of `app`; returns `app`.

    Mount it after the app's own routes: at "/" it answers every path that no earlier route took.
    """
    return gr.mount_gradio_app(
        app,
        build(RunCache(bucket, run).view),
        path,
        head=STYLE,
        theme=gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        max_file_size=1,  # nobody has anything to upload here
    )
