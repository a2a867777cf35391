"""One table: what each Space of a deployment is doing, what it serves and what it costs."""

from __future__ import annotations

import httpx

from delta_weight_sync.plan.prices import READ_ON, price
from trainer import cold_spaces
from trainer.deploy.hub import Found

_HEAD = ("Space", "stage", "hardware", "version", "digest", "$/h")


def table(spaces: list[Found]) -> str:
    """The Spaces as a table, and what all of them cost now and while all of them run."""
    rows = [_row(space) for space in spaces]
    widths = [max(len(row[column]) for row in (_HEAD, *rows)) for column in range(len(_HEAD))]
    lines = [_line(row, widths) for row in (_HEAD, *rows)]
    now = sum(price(s.runtime.hardware) or 0.0 for s in spaces if s.runtime.billed)
    running = sum(price(s.runtime.hardware) or 0.0 for s in spaces)
    total = f"now ${now:.2f} per hour; ${running:.2f} while all of them run (prices of {READ_ON})"
    return "\n".join([*lines, total])


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(space: Found) -> tuple[str, ...]:
    usd = price(space.runtime.hardware)
    cost = "?" if usd is None else f"{usd if space.runtime.billed else 0.0:.2f}"
    version, digest = served(space)
    return space.repo_id, space.runtime.stage, space.runtime.hardware or "-", version, digest, cost


def served(space: Found) -> tuple[str, str]:
    """Version and digest that a running replica serves; no other Space is asked, as that would wake it."""
    if not space.runtime.billed or not space.repo_id.rsplit("-", 1)[-1].isdigit():
        return "-", "-"
    try:
        status = cold_spaces.request(space.url, "GET", "/status").raise_for_status().json()["status"]
        return str(_or_dash(status["version"])), str(_or_dash(status["digest"]))
    except (httpx.HTTPError, cold_spaces.SpacesUnavailableError, ValueError, LookupError, TypeError):
        return "no answer", "-"


def _or_dash(value: object) -> object:
    return "-" if value is None else value
