"""Curves: points in order, kept as few as fit on a page however many come."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

POINTS = 300  # of a curve: more than a screen shows

Point = tuple[float, float]
Series = tuple[Point, ...]
_Group = tuple[int, float, float]  # how many points, the sum of their x, the sum or the largest of their y


class Curve:
    """Takes any number of points and keeps at most `POINTS`, each the mean of as many neighbours.

    Once it is full, neighbours become one and from then on each point stands for twice as many, so that a
    point costs the same in the ten-thousandth version as in the first. With `peaks` the height of a point
    is the largest of its neighbours', which keeps every spike. The curve ends with the newest point.
    """

    def __init__(self, *, peaks: bool = False) -> None:
        self._peaks, self._join = peaks, max if peaks else operator.add
        self._each = 1  # points that one group stands for
        self._groups: list[_Group] = []
        self._newest: Point = (0.0, 0.0)

    def add(self, x: float, y: float) -> None:
        """One more point, right of all others."""
        self._newest = x, y
        if self._groups and self._groups[-1][0] < self._each:
            self._groups[-1] = _joined(self._groups[-1], (1, x, y), self._join)
            return
        if len(self._groups) == POINTS:
            pairs = zip(self._groups[::2], self._groups[1::2], strict=True)
            self._groups = [_joined(left, right, self._join) for left, right in pairs]
            self._each *= 2
        self._groups.append((1, x, y))

    def points(self) -> Series:
        """The curve as it is drawn."""
        curve = tuple((x / count, y if self._peaks else y / count) for count, x, y in self._groups)
        return (*curve, self._newest) if curve and curve[-1][0] != self._newest[0] else curve


def _joined(left: _Group, right: _Group, join: Callable[[float, float], float]) -> _Group:
    return left[0] + right[0], left[1] + right[1], join(left[2], right[2])


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return sum(values) / len(values)


def median(ordered: Sequence[float]) -> float | None:
    """Median of sorted values; None of none."""
    half = len(ordered) // 2
    return mean(ordered[half - 1 + len(ordered) % 2 : half + 1]) if ordered else None


def since(points: Sequence[Point], t: float) -> Series:
    """The end of a staircase: what lies after `t`, and the step it starts on."""
    first = len(points)
    while first > 0 and (first == len(points) or points[first][0] > t):
        first -= 1
    return tuple((max(t, x), y) for x, y in points[first:])
