"""Draws docs/corpus.svg from bench/data/corpus: how many weights change, by learning rate and trainer.

python -m bench.corpus
"""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from bench.corpus_runs import FOLDER
from bench.plots import STYLE, save

Run = list[dict[str, Any]]
_TRAINERS = {"fp32": ("fp32 master weights", "#0969da"), "bf16": ("bf16 weights only", "#bf8700")}
_SHARES = {"density": ("bf16", "-", "full"), "density_fp8": ("the same in FP8", ":", "none")}


def main() -> None:
    """Command line."""
    runs = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(FOLDER.glob("*.jsonl"))
    ]
    with mpl.rc_context(STYLE):
        save("corpus", _paint, [run for run in runs if run[0]["lr"]])


def _paint(axes: Axes, runs: list[Run]) -> None:
    for model in sorted({run[0]["model"] for run in runs}):
        for trainer, (words, colour) in _TRAINERS.items():
            some = [run for run in runs if (run[0]["model"], run[0]["trainer"]) == (model, trainer)]
            some.sort(key=_rate)
            for share, (kind, line, filled) in _SHARES.items():
                shares = [100 * median(row[share] for row in run) for run in some]
                look = {"marker": "o", "fillstyle": filled, "color": colour}
                axes.plot([*map(_rate, some)], shares, line, label=f"{model}, {words}, {kind}", **look)
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="weights changed per version, %")


def _rate(run: Run) -> float:
    return float(median(row["lr"] for row in run))


if __name__ == "__main__":
    main()
