"""The table of section `rival`."""

from __future__ import annotations

from typing import Any

from bench.markdown import table
from bench.results import Results

_WAYS = {"modelexpress": "ModelExpress", "fast": "fast", "small": "small"}


def rival(results: Results) -> str:
    """Bytes and speeds beside ModelExpress on the same deltas."""
    section = results.get("rival", {"unmeasured": "not yet"})
    if "unmeasured" in section:
        return f"Beside ModelExpress: unmeasured ({section['unmeasured']})."
    head = [f"{name}, {unit}" for name in _WAYS.values() for unit in ("B", "out", "in")]
    return table(["delta", "changed", *head], [_row(row) for row in section["sets"]])


def _row(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['model']}, {row['trainer']}", f"{row['share']:.2%}"]
    for way in _WAYS:
        speeds = (f"{row[side][way]['median_gb_s']:.2f}" for side in ("out", "in"))
        cells += [f"**{row['per_change'][way]:.3f}**", *speeds]
    return cells
