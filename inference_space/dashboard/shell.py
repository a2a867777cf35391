"""What is around the views, on a server and in an exported folder alike: tabs, scrubber, scripts."""

from __future__ import annotations

from html import escape
from pathlib import Path

from inference_space.dashboard.explain import explain

STATIC = Path(__file__).parent / "static"
STYLES = ("style.css", "explain.css", "shell.css")
SCRIPTS = (
    "formulas.js",
    "stage.js",
    "ship.js",
    "rounding.js",
    "landing.js",
    "sync.js",
    "explain.js",
    "controls.js",
    "shell.js",
)
_TABS = {"run": "Run", "inside": "Inside a delta", "bucket": "Bucket", "explain": "Explain", "owner": "Owner"}


def navigation(*, owner: bool) -> str:
    """The tabs, and the scrubber of the run's view."""
    scrub = (
        '<div class="scrub view view-run" hidden></div><div class="view view-run" id="dws-past" hidden></div>'
    )
    return _tabs("data-tab", owner=owner) + scrub


def first(page: str, *, owner: bool, scrub: bool) -> str:
    """The run's view before there are scripts; `scrub` leaves room for the scrubber."""
    room = '<div class="scrub"></div>' if scrub else ""
    view = f'<div class="view view-run">{page}</div>'
    return f'<main id="dws" class="first">{_tabs("data-first", owner=owner)}{room}{view}</main>'


def _tabs(attribute: str, *, owner: bool) -> str:
    tabs = "".join(
        f'<a href="#{name}" {attribute}="{name}">{escape(title)}</a>'
        for name, title in _TABS.items()
        if owner or name != "owner"
    )
    return f'<nav aria-label="Views">{tabs}</nav>'


def rest() -> str:
    """The views that scripts fill when they are opened."""
    return (
        '<section class="view view-inside" aria-label="Inside a delta"><h1>Inside a delta</h1>'
        '<div class="pick"></div><div class="filled" aria-live="polite"></div></section>'
        '<section class="view view-bucket" aria-label="Bucket"><h1>The bucket</h1>'
        '<div class="filled"></div></section>'
        f'<section class="view view-explain" aria-label="Explain"><h1>How it works</h1>{explain()}</section>'
    )


def scripts() -> str:
    """All scripts, in the order in which they need each other."""
    return "\n".join((STATIC / name).read_text() for name in SCRIPTS)


def styles() -> str:
    """All style sheets."""
    return "\n".join((STATIC / name).read_text() for name in STYLES)
