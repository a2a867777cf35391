"""Draws docs/study.svg from bench/data/study, which `python -m trainer.study --out bench/data/study` makes.

    python -m bench.study

For each kind of run the reward of each step: the mean of its seeds over five steps, and from the least to the
most of them.
"""

from __future__ import annotations

from statistics import mean

import matplotlib as mpl
from matplotlib.axes import Axes

from bench.plots import STYLE, save
from bench.results import ROOT
from trainer.study.table import ARMS, Arm, Run, read

FOLDER = ROOT / "bench" / "data" / "study"
_COLOURS = ("#8b949e", "#bf8700", "#0969da", "#2da44e", "#cf222e")
_WINDOW = 5  # steps


def main() -> None:
    """Command line."""
    runs = {arm: [read(file) for file in sorted(FOLDER.glob(arm.file("*")))] for arm in ARMS}
    with mpl.rc_context(STYLE):
        save("study", _paint, runs)


def _paint(axes: Axes, runs: dict[Arm, list[Run]]) -> None:
    drawn = set[tuple[tuple[str, ...], ...]]()
    for arm, colour in zip(ARMS, _COLOURS, strict=True):
        digests = tuple(run.digests for run in runs[arm])
        if digests in drawn:  # the very same run as one before it
            continue
        drawn.add(digests)
        curves = [_smooth([step["reward"] for step in run.steps]) for run in runs[arm]]
        steps = range(1, len(curves[0]) + 1)
        axes.plot(steps, [mean(at) for at in zip(*curves, strict=True)], color=colour, label=_label(arm))
        lowest, highest = ([f(at) for at in zip(*curves, strict=True)] for f in (min, max))
        axes.fill_between(steps, lowest, highest, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel="reward")


def _label(arm: Arm) -> str:
    return f"batches {arm.lag} version{'s' if arm.lag > 1 else ''} old"


def _smooth(values: list[float]) -> list[float]:
    return [mean(values[max(0, i + 1 - _WINDOW) : i + 1]) for i in range(len(values))]


if __name__ == "__main__":
    main()
