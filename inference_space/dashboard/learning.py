"""What was learned with this project, as charts: from batches that are old, and by a pretrained model.

`python -m bench.study` writes the figures, from the logs of `python -m trainer.study`, and
`python -m bench.pretrained` those of SmolLM2.
"""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

from inference_space.dashboard import svg
from inference_space.dashboard.formatting import percent, plural
from inference_space.dashboard.panels import Panel
from inference_space.dashboard.static_files import STATIC
from inference_space.dashboard.svg import Mark

_COLOURS = ("good", "delta", "bad")


def charts() -> list[Panel]:
    """All of them."""
    return [_study(), _pretrained()]


def _study() -> Panel:
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


def _pretrained() -> Panel:
    """The reward of SmolLM2-135M at each sync, task by task."""
    rewards: dict[str, list[float]] = json.loads((STATIC / "pretrained.json").read_text())
    tasks = list(zip(_COLOURS, rewards.items(), strict=False))
    points = {css: list(enumerate(line, 1)) for css, (_, line) in tasks}
    syncs, values = zip(*(point for line in points.values() for point in line), strict=True)
    return Panel(
        "A pretrained model",
        "Reward of SmolLM2-135M at each sync and its trend, on two tasks that it was shown for a few minutes"
        " before: to write a text backwards, and Wordle. Trainer and replica shared two CPU cores; at the end"
        " the replica's live weights were the trainer's, bit for bit.",
        "",
        svg.whole(syncs, lambda sync: f"sync {sync:.0f}"),
        svg.linear(values, lambda value: f"{value:.2g}"),
        [
            *(Mark("dots", css, line) for css, line in points.items()),
            *(Mark("line", css, svg.smooth(line)) for css, line in points.items()),
        ],
        [(css, f"{task.replace('_', '-')}: {_ends(line)}") for css, (task, line) in tasks],
    )


def _ends(rewards: list[float]) -> str:
    tenth = max(1, len(rewards) // 10)
    return f"{mean(rewards[:tenth]):.2f} \u2192 {mean(rewards[-tenth:]):.2f}, first and last tenth"
