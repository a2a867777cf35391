"""HTML from the files in `templates/`, with auto-escape: a value that is put into one can never become a tag.

Only `Markup`, which is what a template renders to, is put in as it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.ext import Extension
from markupsafe import Markup

from delta_weight_sync.units import count_text, size_text
from inference_space.dashboard.formatting import age, behind, clock, duration, percent, plural
from inference_space.dashboard.learning import charts
from inference_space.dashboard.panels import colour
from inference_space.dashboard.rollouts import tiles


class _OneLine(Extension):
    """Line breaks and indentation are for readers of a template; in a page they part inline elements."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return re.sub(r"\s*\n\s*", "", source)


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    auto_reload=False,  # a template is part of the program
    extensions=[_OneLine],
)
_FILTERS = (size_text, count_text, duration, age, percent, clock, plural, behind, colour, tiles)
_TEMPLATES.filters |= {function.__name__: function for function in _FILTERS}
_TEMPLATES.globals["charts"] = charts


def render_template(name: str, **values: Any) -> Markup:
    """The HTML of the template `name` with `values` in it."""
    return Markup(_TEMPLATES.get_template(name).render(values))
