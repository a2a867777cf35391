"""What the explaining animations are given; all else that they show is computed by `static/formulas.js`.

Bytes and bytes per second, seconds, and bf16 weights as ordinary numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MANTISSA = 7  # bits that bf16 stores of it
SMALLEST = -126  # exponent of the smallest normal number


@dataclass(frozen=True)
class Facts:
    """What one run measured, or an example; the animations show nothing that does not follow from these."""

    label: str
    full_bytes: float
    delta_bytes: float  # median
    changed: float  # share of the weights that a sync changes, 0 to 1
    weights: int
    step_s: float  # the trainer's time between two hand-overs
    diff_s: float  # the trainer waits for this
    encode_s: float
    stage_s: float
    pause_s: float  # generation stands still for the commit
    poll_s: float  # how often a replica looks at HEAD
    anchor_every: int  # versions


def ulp(weight: float) -> float:
    """The distance from one bf16 number to the next at the magnitude of `weight`."""
    return 2.0 ** (max(_exponent(weight), SMALLEST) - MANTISSA)


def _exponent(weight: float) -> int:
    return math.frexp(weight)[1] - 1 if weight else SMALLEST


def flip_chance(weight: float, update: float) -> float:
    """How likely an update moves the cast of a weight to another number, its fp32 value being anywhere."""
    return min(1.0, abs(update) / ulp(weight))


def flip_share(weights: Sequence[float], updates: Sequence[float], rate: float) -> float:
    """The expected share of `weights` that flip when each moves by `rate` times its update."""
    chances = [flip_chance(w, rate * u) for w, u in zip(weights, updates, strict=True)]
    return sum(chances) / len(chances)


def rate_for_share(weights: Sequence[float], updates: Sequence[float], share: float) -> float:
    """The learning rate at which `share` of the weights are expected to flip."""
    low, high = 1e-9, 1.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if flip_share(weights, updates, middle) < share else (low, middle)
    return math.sqrt(low * high)
