"""The data set's card: written anew from all files of the folder, whoever measured them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from delta_weight_sync.corpus.rows import Row

CARD: Final = "README.md"
_TEMPLATE: Final = Path(__file__).with_name("card.md")


def write(folder: Path) -> None:
    """Write the card of a folder of `.jsonl` files."""
    files = sorted(folder.glob("*.jsonl"))
    runs = [_line([json.loads(row) for row in path.read_text().splitlines()]) for path in files]
    (folder / CARD).write_text(_TEMPLATE.read_text().replace("{runs}", "\n".join(runs)))


def _line(rows: Sequence[Row]) -> str:
    """One run."""
    last, some = rows[-1], [row for row in rows if row["changed"]]
    rates = sorted({row["lr"] for row in rows} - {None})
    cells = [
        last["run"],
        last["model"],
        f"{last['weights'] / 1e6:.3g} M",
        last["trainer"],
        " to ".join(f"{rate:.1e}" for rate in (rates[:1] + rates[1:][-1:])) or "unknown",
        str(len(rows)),
        f"{median(row['density'] for row in rows):.3%}",
        f"{median(row['density_fp8'] for row in rows):.3%}",
        *(_typical(some) if some else ["–"] * 4),
    ]
    return f"| {' | '.join(cells)} |"


def _typical(rows: Sequence[Row]) -> list[str]:
    """Of the versions that changed something."""
    near = median(row["ulps"]["1"] / row["changed"] for row in rows)
    limit = median(row["limits"]["by_exponent"] for row in rows)
    sizes = [
        median(sum(row["bytes"][e].values()) / row["changed"] for row in rows) for e in ("fast", "small")
    ]
    return [f"{near:.0%}", f"{limit:.2f}", *(f"{size:.2f}" for size in sizes)]
