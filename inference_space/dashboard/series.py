"""Curves: points in order, and how they are cut down to what fits on a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

POINTS = 300  # of a curve: more than a screen shows

Point = tuple[float, float]
Series = tuple[Point, ...]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return sum(values) / len(values)


def mean_y(points: Sequence[Point]) -> float | None:
    """Mean height of a curve; None of none."""
    return mean([y for _, y in points]) if points else None


def middle(ordered: Sequence[float]) -> float | None:
    """Median of sorted values; None of none."""
    half = len(ordered) // 2
    return mean(ordered[half - 1 + len(ordered) % 2 : half + 1]) if ordered else None


def thin(points: Sequence[Point], pick: Callable[[list[float]], float] = mean) -> Series:
    """At most `POINTS` points: neighbours become one, its y by `pick`, so `max` keeps every spike."""
    group = math.ceil(len(points) / POINTS)
    if group <= 1:
        return tuple(points)
    groups = (points[start : start + group] for start in range(0, len(points), group))
    return tuple((mean([x for x, _ in some]), pick([y for _, y in some])) for some in groups)


def since(points: Sequence[Point], t: float) -> Series:
    """The end of a staircase: what lies after `t`, and the step it starts on."""
    first = len(points)
    while first > 0 and (first == len(points) or points[first][0] > t):
        first -= 1
    return tuple((max(t, x), y) for x, y in points[first:])
