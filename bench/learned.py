"""Draws what training taught the policies of this project, for the dashboard's Explain tab.

    python -m bench.learned

`bench.study` and `bench.pretrained` write the figures that it reads, and call it.
"""

import json
from collections.abc import Iterable
from functools import partial
from statistics import fmean
from typing import Any

from bench.results import ROOT
from inference_space.dashboard import html
from inference_space.dashboard.charts import Chart, Mark, fitted, linear, smooth
from inference_space.dashboard.state import Point

DATA = ROOT / "bench" / "data"
PAGE = ROOT / "inference_space" / "dashboard" / "templates" / "learned.html"
_COLOURS = ("good", "delta", "bad")


def main() -> None:
    """Write the page."""
    study: dict[str, Any] = json.loads((DATA / "study.json").read_text())
    tasks: dict[str, list[float]] = json.loads((DATA / "pretrained.json").read_text())
    means = [Mark("line", css, line) for css, line in _coloured(curve["reward"] for curve in study["curves"])]
    syncs = [Mark("dots", css, line) for css, line in _coloured(tasks.values())]
    trends = [Mark("line", mark.colour, smooth(mark.points)) for mark in syncs]
    charts = {"staleness": _drawn(means, "step"), "pretrained": _drawn([*syncs, *trends], "sync")}
    figures = {"study": study, "ends": ends(tasks), "charts": charts, "colours": _COLOURS}
    template = html._TEMPLATES.from_string((ROOT / "bench" / "learned.html").read_text())
    PAGE.write_text(template.render(learned=figures) + "\n")


def ends(tasks: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """Mean reward of the first and of the last tenth of each task's syncs."""
    tenths = {task: max(1, len(rewards) // 10) for task, rewards in tasks.items()}
    return {task: (fmean(tasks[task][:n]), fmean(tasks[task][-n:])) for task, n in tenths.items()}


def _coloured(rewards: Iterable[list[float]]) -> list[tuple[str, list[Point]]]:
    return [(css, list(enumerate(line, 1))) for css, line in zip(_COLOURS, rewards, strict=False)]


def _drawn(marks: list[Mark], unit: str) -> Chart:
    steps = partial(linear, words=f"{unit} {{:.0f}}".format, whole=True)
    return fitted(marks, steps, partial(linear, words="{:.2g}".format))


if __name__ == "__main__":
    main()
