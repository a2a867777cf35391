"""Rows of the report: one Markdown table per section. Each row is printed as soon as it is known."""

from collections.abc import Iterator
from typing import NamedTuple


class Row(NamedTuple):
    """One row; `right` is None for a figure without a verdict."""

    what: str
    figure: str = ""
    right: bool | None = None

    def __str__(self) -> str:
        verdict = {True: "PASS", False: "FAIL", None: ""}[self.right]
        return "| " + " | ".join(part.replace("|", "/") for part in (verdict, *self[:2])) + " |"


Rows = Iterator[Row]
HEAD = "| | what | measured |\n| --- | --- | --- |"


def ms(seconds: float) -> str:
    """Milliseconds with three digits."""
    return f"{1e3 * seconds:.3g} ms"


def gb_s(rate: float) -> str:
    """A rate in bytes per second as GB/s."""
    return f"{rate / 1e9:,.3g} GB/s"
