"""Draws docs/study.svg from the files that `python -m bench.research.study --out bench/data/study` makes.

    python -m bench.study

For each kind of run it shows the reward of each step: the mean of the seeds over five steps, and their range.
The means also go to the dashboard: see `bench.learned`.
"""

import json
from collections.abc import Callable, Iterable
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from bench import learned
from bench.plots import STYLE, save
from bench.research.study.table import ARMS, Arm, Run, read
from bench.results import ROOT

FOLDER = ROOT / "bench" / "data" / "study"
_COLOURS = ("#8b949e", "#bf8700", "#0969da", "#2da44e", "#cf222e")
_WINDOW = 5  # steps


def main() -> None:
    """Draw the picture and write the figures."""
    runs = {arm: [read(file) for file in sorted(FOLDER.glob(arm.file("*")))] for arm in ARMS}
    different = {tuple(run.digests for run in found): arm for arm, found in reversed(runs.items())}
    drawn = {arm: runs[arm] for arm in ARMS if arm in different.values()}  # identical runs once
    with mpl.rc_context(STYLE):
        save("study", _paint, drawn)
    (learned.DATA / "study.json").write_text(json.dumps(_figures(drawn)) + "\n")
    learned.main()


def _paint(axes: Axes, runs: dict[Arm, list[Run]]) -> None:
    for (arm, found), colour in zip(runs.items(), _COLOURS, strict=False):
        curves = _curves(found)
        steps = range(1, len(curves[0]) + 1)
        axes.plot(steps, _each(mean, curves), color=colour, label=_label(arm))
        axes.fill_between(
            steps, _each(min, curves), _each(max, curves), color=colour, alpha=0.15, linewidth=0
        )
    axes.set(xlabel="step", ylabel="reward")


def _figures(runs: dict[Arm, list[Run]]) -> dict[str, Any]:
    curves = [
        {
            "staleness": arm.lag,
            "solved": round(mean(run.after for run in found), 4),
            "reward": [round(reward, 4) for reward in _each(mean, _curves(found))],
        }
        for arm, found in runs.items()
    ]
    seeds = next(iter(runs.values()))
    return {"seeds": len(seeds), "before": round(seeds[0].before, 4), "curves": curves}


def _curves(runs: list[Run]) -> list[list[float]]:
    return [smooth([step["reward"] for step in run.steps], _WINDOW) for run in runs]


def _each(of: Callable[[Iterable[float]], float], curves: list[list[float]]) -> list[float]:
    return [of(at) for at in zip(*curves, strict=True)]


def _label(arm: Arm) -> str:
    return f"batches {arm.lag} version{'s' if arm.lag > 1 else ''} old"


def smooth(values: list[float], window: int) -> list[float]:
    """Moving average over `window` values; shorter at the start."""
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


if __name__ == "__main__":
    main()
