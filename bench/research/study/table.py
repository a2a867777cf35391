"""The results of a study's runs as a table.

In lockstep no game depends on time. So the duration of a run over any link follows from the seconds that its
games and its training took and from the bytes of its versions, with a player and a trainer on separate
machines.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from delta_weight_sync.util import size_text


@dataclass(frozen=True)
class Arm:
    """One kind of run: how weights travel, and how many versions old each batch is."""

    name: str
    transport: str
    lag: int

    def file(self, seed: int | str) -> str:
        """The name of a run's file."""
        return f"{self.transport}-{self.lag}-{seed}.jsonl"


# TRL's trainer looks a batch ahead: one version old is as synchronous as it gets.
ARMS = (
    Arm("synchronous, whole weights", "whole", 1),
    Arm("asynchronous, whole weights", "whole", 4),
    Arm("asynchronous, deltas", "deltas", 4),
    Arm("synchronous, deltas", "deltas", 1),
    Arm("very asynchronous, deltas", "deltas", 16),
)
LINKS = (1e5, 1e6, 1e7)  # bytes per second
_LINKS_NOTE = (
    "Wall-clock time over such a link, and the share of the player's time spent waiting for a version."
)
_HEAD = (
    *("run", "staleness", "solved held-out words", "reward", "invalid guesses"),
    *("ratio", "kl", "bytes per sync", "digests as"),
)


@dataclass(frozen=True)
class Run:
    """A run's file: its steps, and the share of held-out games solved before and after."""

    steps: Sequence[dict[str, Any]]
    before: float
    after: float

    @property
    def digests(self) -> tuple[str, ...]:
        """The digest of every version after the first."""
        return tuple(step["digest"] for step in self.steps)

    def late(self, key: str) -> float:
        """Mean of the last quarter of the steps."""
        return mean(step[key] for step in self.steps[-max(1, len(self.steps) // 4) :])


def read(file: Path) -> Run:
    """Read one run."""
    *steps, end = (json.loads(line) for line in file.read_text().splitlines())
    return Run(steps, end["before"] / end["games"], end["after"] / end["games"])


@dataclass(frozen=True)
class Times:
    """Seconds until the last step is trained, and the share of the player's time spent waiting."""

    wall_s: float
    idle: float


def times(steps: Sequence[dict[str, Any]], bytes_s: float) -> Times:
    """Compute a run's duration over a link of `bytes_s`, which carries one version after the other.

    The player starts a batch when the batch before is played and its version has arrived; the trainer takes
    it when the step before is done. The first policy is there at the start.
    """
    there = [0.0]
    played = trained = busy = 0.0
    for number, step in enumerate(steps):
        begun = max(played, there[number - step["staleness"]])
        played = begun + step["play_s"]
        busy += step["play_s"]
        trained = max(trained, played) + step["train_s"]
        there.append(max(trained, there[-1]) + step["size"] / bytes_s)
    return Times(trained, 1 - busy / played)


def table(out: Path, seeds: Sequence[int]) -> str:
    """Make Markdown with a row for each kind of run: means over the seeds with their standard errors."""
    runs = {arm: [read(out / arm.file(seed)) for seed in seeds] for arm in ARMS}
    rows = [_HEAD, ("---",) * len(_HEAD), *(_row(arm, runs) for arm in ARMS)]
    steps = len(runs[ARMS[0]][0].steps)
    note = f"{len(seeds)} seeds, {steps} steps each; \u00b1 one standard error."
    return "\n".join([*_lines(rows), "", note, "", *_lines(_links(runs)), "", _LINKS_NOTE, ""])


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in rows]


def _links(runs: dict[Arm, list[Run]]) -> list[Sequence[str]]:
    """A row for each kind of run: its duration over links of several speeds."""
    head = ("run", *(f"{size_text(speed)}/s" for speed in LINKS))
    rows = [(arm.name, *(_over(own, speed) for speed in LINKS)) for arm, own in runs.items()]
    return [head, ("---",) * len(head), *rows]


def _over(runs: list[Run], speed: float) -> str:
    found = [times(run.steps, speed) for run in runs]
    return f"{mean(one.wall_s for one in found):.0f} s, idle {100 * mean(one.idle for one in found):.0f} %"


def _row(arm: Arm, runs: dict[Arm, list[Run]]) -> tuple[str, ...]:
    own = runs[arm]
    ratios = [step["ratio"] for run in own for step in run.steps]
    solved = f"{100 * mean(run.before for run in own):.1f} % -> {_percent([run.after for run in own])}"
    twins = [
        other.name
        for other in ARMS
        if other != arm and [run.digests for run in runs[other]] == [run.digests for run in own]
    ]
    return (
        arm.name,
        str(max(step["staleness"] for step in own[0].steps)),
        solved,
        f"{mean(run.late('reward') for run in own):.3f}",
        _percent([run.late("invalid") for run in own]),
        f"{min(ratios):.4f} to {max(ratios):.4f}",
        f"{mean(step['kl'] for run in own for step in run.steps):.5f}",
        size_text(mean(step["size"] for run in own for step in run.steps)),
        ", ".join(twins),
    )


def _percent(values: Sequence[float]) -> str:
    """The mean, and its standard error if there are several values."""
    shown = f"{100 * mean(values):.1f}"
    return (
        f"{shown} \u00b1 {100 * stdev(values) / sqrt(len(values)):.1f} %" if len(values) > 1 else f"{shown} %"
    )
