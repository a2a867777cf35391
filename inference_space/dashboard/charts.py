"""The charts of the page: panels of curves, and the last syncs on one time axis.

A chart's paths lie in a box of 1000 x 1000 that the browser stretches. Strokes keep their width, and dots are
the round caps of empty strokes, so nothing is distorted. Colours come from the style sheet, and
`templates/macros.html` puts charts on the page.

To add a panel, collect its curve in `state.py`, draw it in a function here, and add that to `_PANELS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from delta_weight_sync.runlog import SyncEvent
from delta_weight_sync.util import count_text, size_text
from inference_space.dashboard.html import behind, colour, duration, percent
from inference_space.dashboard.state import Point, Progress, Series, SlowestCommit

_BOX = 1000
_FEW = 60  # points up to which dots are large
_LEAST = 1e-12  # of a span: less is rounding, and its ticks would no longer be numbers
_SPANS = tuple(unit * count for unit in (1, 60, 3600, 86_400) for count in (1, 2, 5, 10, 15, 30))
_NONE = "none yet"

Words = Callable[[float], str]


@dataclass(frozen=True)
class Axis:
    """A range of values, and the ticks that are labelled on it."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def places(self, values: Iterable[float]) -> list[float]:
        """Map values to 0 at `low` and 1 at `high`; values outside are clipped."""
        low, high = self.low, self.high
        if self.log:
            values = [math.log10(max(low, value)) for value in values]
            low, high = math.log10(low), math.log10(high)
        found = [(value - low) / (high - low) for value in values]
        return [0.0 if at < 0 else 1.0 if at > 1 else at for at in found]  # three times as fast as min(max())

    @property
    def labels(self) -> list[tuple[str, str]]:
        """The place of each tick as a CSS length, and its text."""
        places = self.places(at for at, _ in self.ticks)
        return [(f"{100 * at:.1f}%", words) for at, (_, words) in zip(places, self.ticks, strict=True)]

    @property
    def rules(self) -> str:
        """An SVG path with a line across the chart at each tick."""
        return "".join(f"M0 {_BOX - at * _BOX:.0f}H{_BOX}" for at in self.places(at for at, _ in self.ticks))


@dataclass(frozen=True)
class Mark:
    """One series of a chart; `colour` is a class of the style sheet."""

    kind: Literal["line", "step", "dots", "area"]
    colour: str
    points: Sequence[Point]

    @property
    def classes(self) -> str:
        """Its classes in the style sheet."""
        return f"{self.kind} {self.colour}{' few' if len(self.points) < _FEW else ''}"

    def path(self, x: Axis, y: Axis) -> str:
        """Draw the series as an SVG path; it is interrupted where a value is not a number."""
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
                case kind:  # "h0" makes a dot of a line with one point
                    path += "M" + "L".join(f"{left} {top}" for left, top in spots) + "h0"
                    path += f"V{_BOX}H{left}Z" if kind == "area" else ""
        return path


@dataclass(frozen=True)
class Panel:
    """A chart with its heading and its legend."""

    title: str
    about: str
    now: str  # the newest value
    x: Axis
    y: Axis
    marks: list[Mark]
    keys: Sequence[tuple[str, str]] = ()  # colour and meaning


@dataclass(frozen=True)
class Timeline:
    """One bar per sync, newest first, all on the same scale."""

    # Version, description, and (part, left, width) of its bars.
    rows: list[tuple[int, str, list[tuple[str, str, str]]]]
    axis: Axis
    keys: Sequence[tuple[str, str]]  # colour and meaning


def linear(values: Iterable[float], words: Words, *, zero: bool = False, whole: bool = False) -> Axis:
    """Return an axis with round ticks, which starts at 0 if `zero`, and has ticks on integers if `whole`."""
    low, high = _range(values, zero)
    step = _round_step((high - low) / 4)
    if whole:
        step = max(1, round(step))
    elif not zero:
        low = math.floor(low / step) * step
    first, last = math.ceil(low / step), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple((n * step, _short(words(n * step))) for n in range(first, last + 1)))


def logarithmic(values: Iterable[float], words: Words) -> Axis:
    """Return a logarithmic axis over whole decades."""
    positive = [value for value in values if value > _LEAST] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)) + 1e-9)
    high = max(high, low + 1)
    ticks = (10.0**n for n in range(low, high + 1, math.ceil((high - low) / 4)))
    return Axis(10.0**low, 10.0**high, tuple((at, _short(words(at))) for at in ticks), log=True)


def ago(first: float, now: float, words: Words) -> Axis:
    """Return a time axis that ends `now`, with ticks on round spans before it."""
    first = min(first, now - 1)
    years = _SPANS[-1] * math.ceil((now - first) / (4 * _SPANS[-1]))
    step = next((step for step in _SPANS if 4 * step >= now - first), years)
    spans = range(step, int(now - first) + 1, step)
    return Axis(first, now, ((now, "now"), *((now - span, f"−{_short(words(span))}") for span in spans)))


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return the trend of a noisy curve: the mean around each point."""
    reach = max(2, len(points) // 24)
    near = ([y for _, y in points[max(0, at - reach) : at + reach + 1]] for at in range(len(points)))
    return [(x, sum(ys) / len(ys)) for (x, _), ys in zip(points, near, strict=True)]


def panels(run: Progress) -> list[Panel]:
    """Draw all panels, in the order of the page."""
    return [draw(run) for draw in _PANELS]


def _reward(run: Progress) -> Panel:
    marks = [Mark("dots", "faint", run.curves["reward"]), Mark("line", "good", smooth(run.curves["reward"]))]
    now = _NONE if run.reward_lately is None else f"{run.reward_lately:.2f}"
    about = "of each optimizer step, and its trend"
    return Panel(
        "Reward",
        about,
        now,
        _steps(run.curves["reward"]),
        linear(_ys(run.curves["reward"]), _short_number),
        marks,
    )


def _versions(run: Progress) -> Panel:
    def until_now(points: Series) -> Series:
        return (*points, (run.last_t, points[-1][1])) if points else ()

    trainer, replicas = until_now(run.trainer), [until_now(replica.versions) for replica in run.replicas]
    marks = [Mark("step", colour(at), points) for at, points in enumerate(replicas)]
    keys = [
        (colour(at), f"{r.name}: {'serves no version' if r.behind is None else behind(r.behind)}")
        for at, r in enumerate(run.replicas)
    ]
    return Panel(
        "Versions",
        "of the trainer, and of each replica after it",
        f"v{run.version}",
        ago(run.trainer[0][0], run.last_t, duration),
        linear(_ys(trainer, *replicas), lambda version: f"v{version:.0f}", whole=True),
        [Mark("step", "trainer", trainer), *reversed(marks)],
        [("trainer", "trainer"), *keys],
    )


def _payload(run: Progress) -> Panel:
    full: Series = ((0, run.full_bytes), (max(1, run.version), run.full_bytes))
    marks = [
        Mark("line", "limit", full),
        *_filled("delta", run.curves["deltas"]),
        Mark("dots", "anchor", run.curves["anchors"]),
    ]
    y = logarithmic(_ys(full, run.curves["deltas"], run.curves["anchors"]), size_text)
    keys = (("delta", "delta"), ("anchor", "anchor"), ("limit", "all weights"))
    now = _NONE if run.payload_bytes is None else size_text(run.payload_bytes)
    return Panel("Payload", "bytes per version", now, _version_axis(full), y, marks, keys)


def _games(run: Progress) -> Panel:
    trends = [
        Mark("line", "good", smooth(run.curves["solved"])),
        Mark("line", "bad", smooth(run.curves["invalid"])),
    ]
    y = linear(_ys(run.curves["solved"], run.curves["invalid"]), percent, zero=True)
    now = percent(run.curves["solved"][-1][1]) if run.curves["solved"] else _NONE
    keys = (("good", "games solved"), ("bad", "guesses that are not a word"))
    marks = [Mark("dots", "faint", run.curves["solved"]), *trends]
    return Panel(
        "Solved", "share of the games of each step", now, _steps(run.curves["solved"]), y, marks, keys
    )


def _lags(run: Progress) -> Panel:
    lines = [replica.lags for replica in run.replicas]
    marks = [Mark("dots", colour(at), points) for at, points in enumerate(lines)]
    keys = [(colour(at), replica.name) for at, replica in enumerate(run.replicas)]
    now = _NONE if run.lag_s is None else duration(run.lag_s)
    x, y = _version_axis(*lines), logarithmic(_ys(*lines), duration)
    return Panel("Time to serving", "from hand-over to commit", now, x, y, marks, keys)


def _saved(run: Progress) -> Panel:
    y = linear(_ys(run.curves["saved"]), size_text, zero=True)
    now = size_text(run.sent_full_bytes - run.sent_bytes) if run.curves["saved"] else _NONE
    about = "so far, compared to all weights at every sync"
    return Panel(
        "Bytes saved",
        about,
        now,
        _version_axis(run.curves["saved"]),
        y,
        _filled("delta", run.curves["saved"]),
    )


def _staleness(run: Progress) -> Panel:
    y = linear(_ys(run.curves["staleness"]), _short_number, zero=True)
    now = _short_number(run.curves["staleness"][-1][1]) if run.curves["staleness"] else _NONE
    about = "of the samples used: syncs since their oldest weights"
    return Panel(
        "Staleness", about, now, _steps(run.curves["staleness"]), y, _filled("share", run.curves["staleness"])
    )


def _pauses(run: Progress) -> Panel:
    y = logarithmic(_ys(run.curves["pauses"]), lambda ms: duration(ms / 1000))
    now = _NONE if run.pause_ms is None else duration(run.pause_ms / 1000)
    marks = [Mark("dots", "pause", run.curves["pauses"])]
    return Panel(
        "Pause", "of generation, on the slowest replica", now, _version_axis(run.curves["pauses"]), y, marks
    )


def _changed(run: Progress) -> Panel:
    y = linear(_ys(run.curves["changed"]), percent, zero=True)
    now = percent(run.curves["changed"][-1][1]) if run.curves["changed"] else _NONE
    x, marks = _version_axis(run.curves["changed"]), _filled("share", run.curves["changed"])
    return Panel("Weights changed", "share per version", now, x, y, marks)


_PANELS = (_reward, _versions, _payload, _games, _lags, _saved, _staleness, _pauses, _changed)


_PARTS = {
    "diff": "diff: the trainer waits",
    "publish": "publish",
    "idle": "until the replica polls",
    "fetch": "fetch",
    "stage": "stage",
    "pause": "commit: generation waits",
}


def timeline(run: Progress) -> Timeline | None:
    """Place the last syncs on one time axis; None before the first delta."""
    syncs = [(sync.version, sync_spans(sync, slow)) for sync, slow in run.syncs if sync.version]
    if not syncs:
        return None
    axis = linear([max(end for _, spans in syncs for *_, end in spans)], duration, zero=True)
    rows = []
    for version, spans in syncs:
        bars = []
        for name, *ends in spans:
            left, right = (100 * at for at in axis.places(ends))
            bars.append((name, f"{left:.2f}%", f"{right - left:.2f}%"))
        words = ", ".join(f"{name} {duration(end - start)}" for name, start, end in spans)
        rows.append((version, words, bars))
    return Timeline(rows, axis, tuple(_PARTS.items()))


def sync_spans(sync: SyncEvent, slow: SlowestCommit | None) -> list[tuple[str, float, float]]:
    """Split a sync into parts: name, start and end in seconds since the hand-over.

    The parts of the replica are placed backwards from its commit.
    """
    spans = [("diff", 0.0, sync.diff_s), ("publish", sync.diff_s, max(sync.diff_s, sync.publish_s))]
    if slow is None:
        return spans
    end = max(slow.last.lag_s, slow.last.pause_ms / 1000)
    stage_end = end - slow.last.pause_ms / 1000
    fetch_end = max(0.0, stage_end - slow.last.stage_s)
    fetch_start = max(0.0, fetch_end - slow.last.fetch_s)
    if fetch_start > sync.publish_s:
        spans.append(("idle", sync.publish_s, fetch_start))
    spans += [("fetch", fetch_start, fetch_end), ("stage", fetch_end, stage_end), ("pause", stage_end, end)]
    return spans


def _filled(css: str, points: Series) -> list[Mark]:
    return [Mark("area", css, points), Mark("line", css, points)]


def _steps(points: Series) -> Axis:
    return linear([x for x, _ in points], lambda step: f"{step:.0f}", whole=True)


def _version_axis(*lines: Series) -> Axis:
    xs = [x for points in lines for x, _ in points]
    return linear(xs, lambda version: f"v{count_text(version)}", whole=True)


def _ys(*lines: Sequence[Point]) -> list[float]:
    return [y for points in lines for _, y in points]


def _short_number(value: float) -> str:
    return f"{value:.2g}"


def _short(words: str) -> str:
    """Drop the zeros at the end of a decimal fraction."""
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
