"""The page: the run in one HTML component that Gradio keeps up to date, and the other views around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import gradio as gr
from markupsafe import Markup

from inference_space.dashboard.controls import Controls, Owner
from inference_space.dashboard.data import EVERY_S, RunView
from inference_space.dashboard.facts import facts_of
from inference_space.dashboard.owner import build as owner_tab
from inference_space.dashboard.panels import panels
from inference_space.dashboard.run_state import LATELY
from inference_space.dashboard.snapshots import moments
from inference_space.dashboard.templates import render_template
from inference_space.dashboard.timeline import timeline
from inference_space.dashboard.view import Progress


def build(
    view: Callable[[], RunView], controls: Controls | None = None, owner: Owner | None = None
) -> gr.Blocks:
    """The dashboard of whatever `view` returns; called once a second per open page.

    Mount it beside the routes of `routes.py`, with `prerender.Prerender` around it, which brings its styles
    and scripts. With `controls` it has the owner's tab.
    """

    def tick(seen: int) -> tuple[Any, Any]:
        now = view()
        return (gr.skip(), gr.skip()) if now.revision == seen else (render(now), now.revision)

    with (
        gr.Blocks(title="Delta Weight Sync", analytics_enabled=False, fill_width=True) as blocks,
        gr.Column(elem_id="dws"),
    ):
        seen = gr.State(-1)
        _html(render_template("navigation.html", owner=controls is not None))
        page = _html("", elem_id="dws-live", elem_classes=["view", "view-run"])
        _html(render_template("views.html"))
        if controls:
            with gr.Column(elem_classes=["view", "view-owner"]):
                owner_tab(controls, owner or Owner())
        events = [blocks.load, gr.Timer(EVERY_S).tick]
        gr.on(events, tick, seen, [page, seen], show_progress="hidden", api_visibility="private")
    for event in blocks.fns.values():
        event.queue = False  # each is one short call: no line to wait in, and one route less to guard
        event.api_visibility = "private"  # or the page would explain how to call it, by the server's name
    return blocks


def _html(content: str, **options: Any) -> gr.HTML:
    return gr.HTML(content, apply_default_css=False, js_on_load=None, **options)


def paint(view: RunView, *, owner: bool) -> Markup:
    """What is there before Gradio's scripts are; it leaves room for the scrubber where there will be one."""
    scrub = view.progress is not None and view.progress.version > 1
    return render_template("prerender.html", page=render(view), owner=owner, scrub=scrub)


@lru_cache(maxsize=2)
def render(view: RunView) -> Markup:
    """The page of one view; worked out once for all its viewers."""
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
    """All that is shown of a run, now or as it was."""
    return render_template("run.html", run=run, lately=LATELY, panels=panels(run), timeline=timeline(run))
