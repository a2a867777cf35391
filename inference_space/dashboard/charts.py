"""The charts of the page: curves with their axes, and the last syncs on one time axis.

A chart's paths lie in a box of 10,000 x 10,000 that the browser stretches. Strokes keep their width. A dot is
a stroke of length 0 with round caps, so dots stay round. Colours come from the style sheet.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Literal

import numpy as np

from delta_weight_sync.runlog import CommitEvent, SyncEvent
from delta_weight_sync.util import count_text, size_text, time_text
from inference_space.dashboard.html import colour, percent
from inference_space.dashboard.state import Point, Progress, Series

_BOX = 10_000
_LEAST = 1e-12  # a span below this share of the largest value is only rounding error
_TICKS = sorted(unit * count for unit in (1, 60, 3600, 86_400) for count in (1, 2, 5, 10, 15, 30))  # seconds

Words = Callable[[float], str]  # writes the label of a tick
Scale = Callable[[list[float]], "Axis"]
Span = tuple[str, float, float]  # name, start and end


@dataclass(frozen=True)
class Axis:
    """A range of values, and the labelled ticks on it."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def places(self, values: Iterable[float]) -> list[float]:
        """Map `low` to 0, `high` to 1 and the values between them; values outside are clipped."""
        found = np.array([*values], np.float64)
        low = self.low
        high = self.high
        if self.log:
            found = np.log10(np.maximum(found, low))
            low = math.log10(low)
            high = math.log10(high)
        return [float(place) for place in np.clip((found - low) / (high - low), 0, 1)]

    @property
    def labels(self) -> list[tuple[float, str]]:
        """The place of each tick, from 0 to 1, and its text."""
        places = self.places(at for at, _ in self.ticks)
        return [(place, words) for place, (_, words) in zip(places, self.ticks, strict=True)]


@dataclass(frozen=True)
class Mark:
    """One series of a chart; `colour` is a class of the style sheet."""

    kind: Literal["line", "step", "dots", "area"]
    colour: str
    points: Sequence[Point]

    def path(self, x: Axis, y: Axis) -> str:
        """Draw the series as an SVG path, with a gap where a value is NaN."""
        path = ""
        for missing, points in groupby(self.points, key=lambda point: math.isnan(point[1])):
            if missing:
                continue
            xs, ys = zip(*points, strict=True)
            across = [round(at * _BOX) for at in x.places(xs)]
            spots = list(zip(across, [round(_BOX - at * _BOX) for at in y.places(ys)], strict=True))
            (left, top), *rest = spots
            match self.kind:
                case "dots":
                    path += "".join(f"M{left} {top}h0" for left, top in spots)
                case "step":
                    path += f"M{left} {top}h0" + "".join(f"H{left}V{top}" for left, top in rest)
                case kind:  # "h0" makes a line of a single point visible, as a dot
                    path += "M" + "L".join(f"{left} {top}" for left, top in spots) + "h0"
                    path += f"V{_BOX}H{left}Z" if kind == "area" else ""
        return path


@dataclass(frozen=True)
class Chart:
    x: Axis
    y: Axis
    marks: Sequence[Mark]


def linear(values: Iterable[float], words: Words, *, zero: bool = False, whole: bool = False) -> Axis:
    """Return an axis with round ticks. `zero`: the axis starts at 0. `whole`: the ticks are integers."""
    low, high = _range(values, zero)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    if whole:
        step = max(1, round(step))
    elif not zero:
        low = math.floor(low / step) * step
    first = math.ceil(low / step)
    last = math.floor(high / step + 1e-9)
    return Axis(low, high, tuple((n * step, words(n * step)) for n in range(first, last + 1)))


def logarithmic(values: Iterable[float], words: Words) -> Axis:
    """Return a logarithmic axis over whole decades."""
    positive = [value for value in values if value > _LEAST] or [1.0]
    low = math.floor(math.log10(min(positive)))
    high = math.ceil(math.log10(max(positive)) + 1e-9)
    high = max(high, low + 1)
    ticks = (10.0**n for n in range(low, high + 1, math.ceil((high - low) / 4)))
    return Axis(10.0**low, 10.0**high, tuple((at, words(at)) for at in ticks), log=True)


def ago(first: float, now: float) -> Axis:
    """Return a time axis that ends at `now`, with ticks at round spans before `now`."""
    first = min(first, now - 1)
    months = _TICKS[-1] * math.ceil((now - first) / (4 * _TICKS[-1]))  # the step for more than 120 days
    step = next((step for step in _TICKS if 4 * step >= now - first), months)
    spans = range(step, int(now - first) + 1, step)
    return Axis(first, now, ((now, "now"), *((now - span, f"−{time_text(span)}") for span in spans)))


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return the moving average of a noisy curve."""
    reach = max(2, len(points) // 24)
    near = ([y for _, y in points[max(0, at - reach) : at + reach + 1]] for at in range(len(points)))
    return [(x, sum(ys) / len(ys)) for (x, _), ys in zip(points, near, strict=True)]


def fitted(marks: Sequence[Mark], x: Scale, y: Scale) -> Chart:
    """Return a chart whose axes span all its points."""
    points = [point for mark in marks for point in mark.points]
    return Chart(x([across for across, _ in points]), y([up for _, up in points]), marks)


_STEPS = partial(linear, words="{:.0f}".format, whole=True)
_VERSIONS = partial(linear, words=lambda version: f"v{count_text(version)}", whole=True)


def charts(run: Progress, other: Progress | None = None) -> dict[str, Chart]:
    """Return the chart of each panel, by name. `other` is a run to compare: it has a curve in some charts."""

    def until_now(points: Series) -> Series:
        return (*points, (run.last_t, points[-1][1])) if points else ()

    def beside(name: str) -> list[Mark]:
        return _compared(other.curves[name]) if other else []

    curves = run.curves
    replicas = [(colour(at), replica) for at, replica in enumerate(run.replicas)]
    rewards = [Mark("dots", "faint", curves["reward"]), Mark("line", "good", smooth(curves["reward"]))]
    # Later marks cover earlier ones, so the first replica comes last.
    stairs = [Mark("step", css, until_now(replica.versions)) for css, replica in reversed(replicas)]
    full = Mark("line", "limit", ((0, run.full_bytes), (max(1, run.version), run.full_bytes)))
    sizes = [full, *_filled("delta", curves["deltas"]), Mark("dots", "anchor", curves["anchors"])]
    rates = [Mark("line", "good", smooth(curves["solved"])), Mark("line", "bad", smooth(curves["invalid"]))]
    games = [Mark("dots", "faint", curves["solved"]), *rates]
    pauses = [Mark("dots", "pause", curves["pauses"])]
    saved = _filled("delta", curves["saved"])
    number = partial(linear, words="{:.2g}".format)
    share = partial(linear, words=percent, zero=True)
    size = partial(logarithmic, words=size_text)
    time = partial(logarithmic, words=time_text)
    return {
        "reward": fitted([*beside("reward"), *rewards], _STEPS, number),
        "versions": fitted(
            [Mark("step", "trainer", until_now(run.trainer)), *stairs],
            lambda _: ago(run.trainer[0][0], run.last_t),
            partial(linear, words="v{:.0f}".format, whole=True),
        ),
        "payload": fitted([*beside("deltas"), *sizes], _VERSIONS, size),
        "solved": fitted(games, _STEPS, share),
        "lags": fitted([Mark("dots", css, replica.lags) for css, replica in replicas], _VERSIONS, time),
        "saved": fitted(saved, _VERSIONS, partial(linear, words=size_text, zero=True)),
        "staleness": fitted(
            [*_filled("share", curves["staleness"]), *beside("staleness")], _STEPS, partial(number, zero=True)
        ),
        "pauses": fitted(pauses, _VERSIONS, partial(logarithmic, words=lambda ms: time_text(ms / 1000))),
        "changed": fitted([*_filled("share", curves["changed"]), *beside("changed")], _VERSIONS, share),
    }


def metric_charts(run: Progress, other: Progress | None = None) -> dict[str, Chart]:
    """Return the chart of each metric that has a panel, by the panel's title. `other` is as for `charts`."""
    return _each_chart(run.metrics, other.metrics if other else {}, _STEPS)


def score_charts(run: Progress, other: Progress | None = None) -> dict[str, Chart]:
    """Return the chart of each score of `evaluate`, as `metric_charts` does."""
    return _each_chart(run.scores, other.scores if other else {}, _VERSIONS)


def _each_chart(
    curves: Mapping[str, Series], others: Mapping[str, Series], across: Scale
) -> dict[str, Chart]:
    number = partial(linear, words="{:.3g}".format)
    drawn: dict[str, Chart] = {}
    for title, points in curves.items():
        marks = _compared(others[title]) if title in others else []
        marks += [Mark("dots", "faint", points), Mark("line", "good", smooth(points))]
        drawn[title] = fitted(marks, across, number)
    return drawn


def timeline(run: Progress) -> tuple[list[tuple[int, list[Span]]], Axis]:
    """Return (version, parts) of each of the last syncs, newest first, and a time axis for all parts."""
    rows = [(sync.version, sync_spans(sync, slow)) for sync, slow in run.syncs if sync.version]
    return rows, linear([end for _, spans in rows for *_, end in spans], time_text, zero=True)


def sync_spans(sync: SyncEvent, slow: CommitEvent | None) -> list[Span]:
    """Split a sync into parts: name, start and end, in seconds since the trainer handed over the weights.

    `slow` is the commit of the replica that was last to serve the version. A commit records its end and how
    long each part took, so the replica's parts are placed from the end backwards.
    """
    spans = [("diff", 0.0, sync.diff_s), ("publish", sync.diff_s, max(sync.diff_s, sync.publish_s))]
    if slow is None:
        return spans
    end = max(slow.lag_s, slow.pause_ms / 1000)
    stage_end = end - slow.pause_ms / 1000
    fetch_end = max(0.0, stage_end - slow.stage_s)
    fetch_start = max(0.0, fetch_end - slow.fetch_s)
    if fetch_start > sync.publish_s:
        spans.append(("idle", sync.publish_s, fetch_start))
    spans += [("fetch", fetch_start, fetch_end), ("stage", fetch_end, stage_end), ("pause", stage_end, end)]
    return spans


def _compared(points: Series) -> list[Mark]:
    """The curve of another run, as its trend."""
    return [Mark("line", "other", smooth(points))] if points else []


def _filled(css: str, points: Series) -> list[Mark]:
    return [Mark("area", css, points), Mark("line", css, points)]


def _range(values: Iterable[float], zero: bool) -> tuple[float, float]:
    seen = [value for value in values if math.isfinite(value)] or [0.0]
    low = 0.0 if zero else min(seen)
    high = max(seen)
    size = max(abs(low), abs(high), _LEAST)
    if high - low > _LEAST * size:
        return low, high + (high - low) * (0.08 if zero else 0)
    return low, low + (size if size > _LEAST else 1.0)
