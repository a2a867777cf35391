"""What a link does to a run: when each batch is played, each step trained, and each version there.

In lockstep no game depends on time. So the times of a run follow, for any link, from the seconds that its
games and its training took and from the bytes of its versions: a player and a trainer, each on a machine of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Times:
    """Until the last step is trained, and the share of the player's time spent waiting for a version."""

    wall_s: float
    idle: float


def times(steps: Sequence[dict[str, Any]], bytes_s: float) -> Times:
    """Of a run's steps over a link of so many bytes per second, which carries one version after the other.

    A batch is played once the one before is, and its version is there; it is trained on once the step before
    is over. The policy to begin with is there at the start.
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
