"""The page: the run in one HTML component that Gradio keeps up to date, and the other views around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from html import escape
from typing import Any

import gradio as gr

from inference_space.dashboard.boards import boards
from inference_space.dashboard.controls import Controls, Owner
from inference_space.dashboard.data import EVERY_S, RunView
from inference_space.dashboard.facts import facts_of
from inference_space.dashboard.headline import headline
from inference_space.dashboard.owner import build as owner_tab
from inference_space.dashboard.panels import panels
from inference_space.dashboard.past import moments
from inference_space.dashboard.shell import first, navigation, rest
from inference_space.dashboard.tables import tables
from inference_space.dashboard.view import Progress
from inference_space.dashboard.words import age, clock, plural


def build(
    view: Callable[[], RunView], controls: Controls | None = None, owner: Owner | None = None
) -> gr.Blocks:
    """The dashboard of whatever `view` returns; called once a second per open page.

    Mount it beside the routes of `routes.py`, with `first.FirstPaint` around it, which brings its styles and
    scripts. With `controls` it has the owner's tab.
    """

    def tick(seen: int) -> tuple[Any, Any]:
        now = view()
        return (gr.skip(), gr.skip()) if now.revision == seen else (render(now), now.revision)

    with (
        gr.Blocks(title="Delta Weight Sync", analytics_enabled=False, fill_width=True) as blocks,
        gr.Column(elem_id="dws"),
    ):
        seen = gr.State(-1)
        _html(navigation(owner=controls is not None))
        page = _html("", elem_id="dws-live", elem_classes=["view", "view-run"])
        _html(rest())
        if controls:
            with gr.Column(elem_classes=["view", "view-owner"]):
                owner_tab(controls, owner or Owner())
        events = [blocks.load, gr.Timer(EVERY_S).tick]
        gr.on(events, tick, seen, [page, seen], show_progress="hidden", api_visibility="private")
    for event in blocks.fns.values():
        event.queue = False  # each is one short call: no line to wait in, and one route less to guard
    return blocks


def _html(content: str, **options: Any) -> gr.HTML:
    return gr.HTML(content, apply_default_css=False, js_on_load=None, **options)


def paint(view: RunView, *, owner: bool) -> str:
    """What is there before Gradio's scripts are."""
    enough = view.progress is not None and view.progress.version > 1
    return first(render(view), owner=owner, scrub=enough)


@lru_cache(maxsize=2)
def render(view: RunView) -> str:
    """The page of one view; worked out once for all its viewers."""
    alert = f'<p class="alert" role="alert">{escape(view.problem)}</p>' if view.problem else ""
    run = view.progress
    if run is None:
        waiting = f'<h1>{escape(_waiting(view))}</h1><p class="lead">{_patience(view)}</p>'
        return f'<div class="page" data-run="">{_top(view)}{alert}{waiting}</div>'
    shown = f"{view.run} measured" if facts_of(run, view.model) else f"{view.run}"
    where = f'data-run="{escape(shown)}" data-version="{run.version}" data-moments="{moments(run.version)}"'
    return f'<div class="page" {where}>{_top(view)}{alert}{body(run)}</div>'


def body(run: Progress) -> str:
    """All that is shown of a run, now or as it was."""
    return headline(run) + panels(run) + tables(run) + boards(run)


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
        return "idle", "waiting" if view.read else "reading"
    if view.progress.done:
        return "done", "training ended"
    return ("idle", f"quiet for {age(view.quiet_min)}") if view.quiet_min else ("live", "live")


def _patience(view: RunView) -> str:
    read = f"<b>{plural(view.parts, 'part')}</b> of its log so far. " if view.parts else ""
    return f"{read}Leave this page open, it goes on by itself."


def _waiting(view: RunView) -> str:
    if view.problem:
        return "The dashboard shows the run as soon as the bucket can be read."
    if not view.read:
        return f"Reading run {view.run!r} …" if view.run else "Reading the bucket …"
    name = f"run {view.run!r}" if view.run else "a run"
    return f"Waiting for a trainer to publish the first version of {name} to {view.bucket} …"
