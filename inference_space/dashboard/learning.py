"""What the project's study found, as a chart: how the demo's policy learns from batches that are old.

`python -m bench.study` writes the figures, from the logs of `python -m trainer.study`.
"""

from __future__ import annotations

import json
from typing import Any

from inference_space.dashboard import svg
from inference_space.dashboard.formatting import percent, plural
from inference_space.dashboard.panels import Panel
from inference_space.dashboard.static_files import STATIC
from inference_space.dashboard.svg import Mark

_COLOURS = ("good", "delta", "bad")


def study() -> Panel:
    """The mean reward of all seeds at each step, by how many versions old the batches were."""
    figures: dict[str, Any] = json.loads((STATIC / "study.json").read_text())
    curves = dict(zip(_COLOURS, figures["curves"], strict=True))
    points = {css: tuple(enumerate(curve["reward"], 1)) for css, curve in curves.items()}
    steps, rewards = zip(*(point for line in points.values() for point in line), strict=True)
    return Panel(
        "What staleness costs",
        f"Reward of the demo's policy at each step, the mean of {figures['seeds']} seeds, by how many"
        " versions old the batches are that it trains on. It solves"
        f" {percent(figures['before'])} of held-out words before. Where weights travel whole and not as"
        " deltas, the run is the same at every version, bit for bit.",
        "",
        svg.whole(steps, lambda step: f"step {step:.0f}"),
        svg.linear(rewards, lambda value: f"{value:.2g}"),
        [Mark("line", css, line) for css, line in points.items()],
        [(css, _key(curve)) for css, curve in curves.items()],
    )


def _key(curve: dict[str, Any]) -> str:
    old = curve["staleness"]
    return f"{plural(old, 'version')} old: {percent(curve['solved'])} solved after"
