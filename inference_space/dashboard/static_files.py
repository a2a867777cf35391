"""The scripts and style sheets of the page, on a server and in an exported folder alike."""

from __future__ import annotations

from pathlib import Path

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


def scripts() -> str:
    """All scripts, in the order in which they need each other."""
    return _joined(SCRIPTS)


def styles() -> str:
    """All style sheets."""
    return _joined(STYLES)


def _joined(names: tuple[str, ...]) -> str:
    return "\n".join((STATIC / name).read_text() for name in names)
