"""The page: one HTML component that Gradio keeps up to date."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from inference_space.dashboard.data import EVERY_S, RunView
from inference_space.dashboard.headline import headline
from inference_space.dashboard.panels import panels
from inference_space.dashboard.tables import tables
from inference_space.dashboard.words import age, clock

STYLE = f"<style>{(Path(__file__).parent / 'style.css').read_text()}</style>"


def build(view: Callable[[], RunView]) -> gr.Blocks:
    """The dashboard of whatever `view` returns; it is called about once a second for every open page.

    Mount it with `head=STYLE`.
    """

    def tick(seen: int) -> tuple[Any, Any]:
        now = view()
        return (gr.skip(), gr.skip()) if now.revision == seen else (render(now), now.revision)

    with gr.Blocks(title="Delta Weight Sync", analytics_enabled=False, fill_width=True) as blocks:
        seen = gr.State(-1)
        page = gr.HTML(apply_default_css=False, js_on_load=None, elem_id="dws")
        events = [blocks.load, gr.Timer(EVERY_S).tick]
        gr.on(events, tick, seen, [page, seen], show_progress="hidden", queue=False, api_visibility="private")
    return blocks


@lru_cache(maxsize=2)
def render(view: RunView) -> str:
    """The page of one view; worked out once for all its viewers."""
    alert = f'<p class="alert" role="alert">{escape(view.problem)}</p>' if view.problem else ""
    run = view.progress
    inside = (
        headline(run) + panels(run) + tables(run)
        if run
        else f'<h1>{escape(_waiting(view))}</h1><p class="lead">{_PATIENCE}</p>'
    )
    return f"<main>{_top(view)}{alert}{inside}</main>"


def _top(view: RunView) -> str:
    parts = [part for part in (view.run, view.model, view.bucket) if part]
    if view.progress:
        parts.append(f"last event {clock(view.progress.last_t)}")
    state, words = _state(view)
    where = "".join(f"<span>{escape(part)}</span>" for part in parts)
    return f'<header><strong class="{state}">{words}</strong>{where}</header>'


def _state(view: RunView) -> tuple[str, str]:
    if view.problem:
        return "bad", "bucket not readable"
    if view.progress is None:
        return "idle", "waiting"
    if view.progress.done:
        return "done", "training ended"
    return ("idle", f"quiet for {age(view.quiet_min)}") if view.quiet_min else ("live", "live")


_PATIENCE = "Leave this page open, it goes on by itself."


def _waiting(view: RunView) -> str:
    if view.problem:
        return "The dashboard shows the run as soon as the bucket can be read."
    if not view.read:
        return "Reading the bucket …"
    name = f"run {view.run!r}" if view.run else "a run"
    return f"Waiting for a trainer to publish the first version of {name} to {view.bucket} …"
