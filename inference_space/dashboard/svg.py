"""The axes and paths of small charts that stretch with the page; `templates/macros.html` draws them.

A path lies in a box of 1000 x 1000 that the browser stretches. Strokes keep their width and dots are round
caps of empty strokes, so nothing is distorted. Colours come from the CSS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from inference_space.dashboard.series import Point, mean

BOX = 1000
FEW = 60  # points that are few enough for large dots
_LEAST = 1e-12  # of a span: less is rounding, and its ticks are no numbers any more
_SPANS = tuple(unit * count for unit in (1, 60, 3600, 86_400) for count in (1, 2, 5, 10, 15, 30))


@dataclass(frozen=True)
class Axis:
    """A range of values, and the ticks that are labelled on it."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def places(self, values: Iterable[float]) -> list[float]:
        """Where `values` lie: 0 at `low`, 1 at `high`, cut off beyond."""
        low, high = self.low, self.high
        if self.log:
            values = [math.log10(max(low, value)) for value in values]
            low, high = math.log10(low), math.log10(high)
        found = [(value - low) / (high - low) for value in values]
        return [0.0 if at < 0 else 1.0 if at > 1 else at for at in found]  # three times as fast as min(max())

    def place(self, value: float) -> float:
        """Where one value lies."""
        return self.places([value])[0]

    @property
    def labels(self) -> list[tuple[str, str]]:
        """Where each tick lies, as a length in CSS, and its words."""
        return [(f"{100 * self.place(at):.1f}%", words) for at, words in self.ticks]

    @property
    def rules(self) -> str:
        """A line across the drawing at each tick, as the path of an SVG."""
        return "".join(f"M0 {BOX - self.place(at) * BOX:.0f}H{BOX}" for at, _ in self.ticks)


@dataclass(frozen=True)
class Mark:
    """One series of a chart; `colour` is a class of the style sheet."""

    kind: Literal["line", "step", "dots", "area"]
    colour: str
    points: Sequence[Point]

    @property
    def classes(self) -> str:
        """Its classes in the style sheet."""
        return f"{self.kind} {self.colour}{' few' if len(self.points) < FEW else ''}"

    def path(self, x: Axis, y: Axis) -> str:
        """The path of an SVG."""
        return "".join(_DRAW[self.kind](_spots(run, x, y)) for run in _unbroken(self.points))


def linear(values: Iterable[float], words: Callable[[float], str], *, zero: bool = False) -> Axis:
    """An axis around `values` with about four round ticks; from 0 where `zero`."""
    low, high = _range(values, zero)
    step = _round_step((high - low) / 4)
    if not zero:
        low = math.floor(low / step) * step
    return Axis(low, high, _ticks(low, high, step, words))


def ago(first: float, now: float, words: Callable[[float], str]) -> Axis:
    """A time axis that ends `now`; ticks on round spans before it."""
    first = min(first, now - 1)
    years = _SPANS[-1] * math.ceil((now - first) / (4 * _SPANS[-1]))
    step = next((step for step in _SPANS if 4 * step >= now - first), years)
    spans = range(step, int(now - first) + 1, step)
    return Axis(first, now, ((now, "now"), *((now - span, f"−{_short(words(span))}") for span in spans)))


def logarithmic(values: Iterable[float], words: Callable[[float], str]) -> Axis:
    """A logarithmic axis over whole decades."""
    positive = [value for value in values if value > _LEAST] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)) + 1e-9)
    high = max(high, low + 1)
    ticks = (10.0**n for n in range(low, high + 1, math.ceil((high - low) / 4)))
    return Axis(10.0**low, 10.0**high, tuple((at, _short(words(at))) for at in ticks), log=True)


def whole(values: Iterable[float], words: Callable[[float], str]) -> Axis:
    """An axis from the first to the last of `values`, ticks on whole numbers."""
    low, high = _range(values, zero=False)
    step = max(1, round(_round_step((high - low) / 4)))
    return Axis(low, high, _ticks(low, high, step, words))


def smooth(points: Sequence[Point]) -> list[Point]:
    """The trend of a noisy curve: the mean of each point's neighbourhood."""
    reach = max(2, len(points) // 24)
    near = (points[max(0, at - reach) : at + reach + 1] for at in range(len(points)))
    return [(x, mean([y for _, y in some])) for (x, _), some in zip(points, near, strict=True)]


Spots = list[tuple[int, int]]


def _spots(run: Sequence[Point], x: Axis, y: Axis) -> Spots:
    across, up = x.places(at for at, _ in run), y.places(value for _, value in run)
    return [(round(left * BOX), round(BOX - top * BOX)) for left, top in zip(across, up, strict=True)]


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    runs = groupby(points, key=lambda point: math.isnan(point[1]))
    return [list(run) for broken, run in runs if not broken]


def _line(spots: Spots) -> str:
    return "M" + "L".join(f"{left} {top}" for left, top in spots) + "h0"  # a dot where there is one spot


def _step(spots: Spots) -> str:
    (left, top), *rest = spots
    return f"M{left} {top}h0" + "".join(f"H{left}V{top}" for left, top in rest)


def _dots(spots: Spots) -> str:
    return "".join(f"M{left} {top}h0" for left, top in spots)


def _area(spots: Spots) -> str:
    return f"{_line(spots)}V{BOX}H{spots[0][0]}Z"


_DRAW: dict[str, Callable[[Spots], str]] = {"line": _line, "step": _step, "dots": _dots, "area": _area}


def _ticks(
    low: float, high: float, step: float, words: Callable[[float], str]
) -> tuple[tuple[float, str], ...]:
    first, last = math.ceil(low / step), math.floor(high / step + 1e-9)
    return tuple((n * step, _short(words(n * step))) for n in range(first, last + 1))


def _short(words: str) -> str:
    return re.sub(r"\.0+(?!\d)|(\.\d*[1-9])0+(?!\d)", r"\1", words)


def _range(values: Iterable[float], zero: bool) -> tuple[float, float]:
    seen = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = (0.0 if zero else min(seen)), max(seen)
    size = max(abs(low), abs(high), _LEAST)
    if high - low > _LEAST * size:
        return low, high + (high - low) * (0.08 if zero else 0)
    return low, low + (size if size > _LEAST else 1.0)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
