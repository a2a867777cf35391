"""Formats values for people, renders the templates, and reads the page's scripts and style sheets.

Templates escape every value, so that no value can become a tag; only `Markup` is inserted unchanged.
"""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.ext import Extension
from markupsafe import Markup

from delta_weight_sync.util import count_text, size_text, time_text

STATIC = Path(__file__).parent / "static"
# Each script needs the scripts before it.
_SCRIPTS = "formulas stage ship rounding landing sync explain controls shell hover".split()  # noqa: SIM905
_COLOURS = 6  # different colours of replicas
# For each letter of a guess, Wordle answers the letter, its place and a mark, such as c1-r2?a3+n4-e5-.
_GUESS = re.compile(r"(?:([a-z])\d([+?-]))+")
_LETTER = re.compile(r"([a-z])\d([+?-])")
_MARK = {"+": ("hit", "in place"), "?": ("near", "elsewhere"), "-": ("miss", "not in the word")}


def age(minutes: int) -> str:
    """Format a rough time span: `3 min`, `5 h`, `12 days`."""
    hours = minutes // 60
    return f"{minutes} min" if hours < 2 else f"{hours} h" if hours < 48 else f"{hours // 24} days"


def percent(share: float) -> str:
    """Format a share, given as a number from 0 to 1: `0.83 %`."""
    return f"{100 * share:.3g} %"


def clock(t: float) -> str:
    """Format unix seconds as a time of day in UTC."""
    return f"{datetime.fromtimestamp(t, UTC):%H:%M:%S} UTC"


def plural(count: int, noun: str) -> str:
    """Count a noun: `1 replica`, `2 replicas`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def colour(index: int) -> str:
    """Name the CSS class that colours the replica at `index`."""
    return f"r{index % _COLOURS}"


def tiles(answer: str) -> list[tuple[str, str, str]]:
    """Split Wordle's answer to a guess into tiles: letter, CSS class, meaning. Empty for any other text."""
    guess = _GUESS.match(answer)
    return [(letter, *_MARK[mark]) for letter, mark in _LETTER.findall(guess[0])] if guess else []


class _OneLine(Extension):
    """Drops line breaks and indentation, which would show as gaps between inline elements."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return re.sub(r"\s*\n\s*", "", source)


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    auto_reload=False,  # templates are part of the program
    extensions=[_OneLine],
)
_FILTERS = (size_text, count_text, time_text, age, percent, clock, plural, colour, tiles)
_TEMPLATES.filters |= {function.__name__: function for function in _FILTERS}


def render_template(name: str, **values: Any) -> Markup:
    return Markup(_TEMPLATES.get_template(name).render(values))


def scripts() -> str:
    return "\n".join((STATIC / f"{name}.js").read_text() for name in _SCRIPTS)


def styles() -> str:
    return "\n".join((STATIC / name).read_text() for name in ("style.css", "explain.css", "shell.css"))
