"""The charts of the page: is it learning, is every replica current, what did a sync cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from delta_weight_sync.units import count_text, size_text
from inference_space.dashboard import svg
from inference_space.dashboard.formatting import behind, duration, percent
from inference_space.dashboard.series import Point, Series
from inference_space.dashboard.svg import Mark
from inference_space.dashboard.view import Progress, Replica

COLOURS = 6  # of replicas, before they repeat


@dataclass(frozen=True)
class Panel:
    """A chart with its heading and its legend."""

    title: str
    about: str
    now: str
    x: svg.Axis
    y: svg.Axis
    marks: list[Mark]
    keys: Sequence[tuple[str, str]] = ()  # colour, what it stands for


def panels(run: Progress) -> list[Panel]:
    """All charts, in the order of the page."""
    return [draw(run) for draw in _PANELS]


def colour(index: int) -> str:
    """The class that colours the replica at `index`."""
    return f"r{index % COLOURS}"


def _versions(run: Progress) -> Panel:
    lines = [("trainer", _until(run.trainer, run.last_t))]
    lines += [(colour(at), _until(r.versions, run.last_t)) for at, r in enumerate(run.replicas)]
    x = svg.ago(run.trainer[0][0], run.last_t, duration)
    y = svg.whole(_ys(points for _, points in lines), lambda version: f"v{version:.0f}")
    marks = [Mark("step", css, points) for css, points in (lines[0], *reversed(lines[1:]))]
    keys = [("trainer", "trainer"), *((colour(at), _behind(r)) for at, r in enumerate(run.replicas))]
    about = "the trainer's, and each replica's after it"
    return Panel("Versions", about, f"v{run.version}", x, y, marks, keys)


def _behind(replica: Replica) -> str:
    return f"{replica.name}: {'serves none' if replica.behind is None else behind(replica.behind)}"


def _reward(run: Progress) -> Panel:
    marks = [Mark("dots", "faint", run.reward), Mark("line", "good", svg.smooth(run.reward))]
    y = svg.linear(_ys([run.reward]), lambda value: f"{value:.2g}")
    now = "none yet" if run.reward_lately is None else f"{run.reward_lately:.2f}"
    return Panel("Reward", "of each optimizer step, and its trend", now, _steps(run.reward), y, marks)


def _games(run: Progress) -> Panel:
    trends = [Mark("line", "good", svg.smooth(run.solved)), Mark("line", "bad", svg.smooth(run.invalid))]
    marks = [Mark("dots", "faint", run.solved), *trends]
    y = svg.linear(_ys([run.solved, run.invalid]), percent, zero=True)
    now = percent(run.solved[-1][1]) if run.solved else "none yet"
    keys = (("good", "games solved"), ("bad", "guesses that are no word"))
    return Panel("Solved", "of the games of each step", now, _steps(run.solved), y, marks, keys)


def _staleness(run: Progress) -> Panel:
    y = svg.linear(_ys([run.staleness]), lambda value: f"{value:.2g}", zero=True)
    now = f"{run.staleness[-1][1]:.2g}" if run.staleness else "none yet"
    about = "of the samples used: syncs since their oldest weights"
    return Panel("Staleness", about, now, _steps(run.staleness), y, _filled("share", run.staleness))


def _saved(run: Progress) -> Panel:
    y = svg.linear(_ys([run.saved]), size_text, zero=True)
    now = size_text(run.sent_full_bytes - run.sent_bytes) if run.saved else "none yet"
    about = "against all weights at every sync, summed up"
    return Panel("Bytes saved", about, now, _version_axis([run.saved]), y, _filled("delta", run.saved))


def _payload(run: Progress) -> Panel:
    full: Series = ((0, run.full_bytes), (max(1, run.version), run.full_bytes))
    marks = [Mark("line", "limit", full), *_filled("delta", run.deltas), Mark("dots", "anchor", run.anchors)]
    y = svg.logarithmic(_ys([full, run.deltas, run.anchors]), size_text)
    keys = (("delta", "delta"), ("anchor", "anchor"), ("limit", "all weights"))
    now = "none yet" if run.payload_bytes is None else size_text(run.payload_bytes)
    return Panel("Payload", "bytes per version", now, _version_axis([full]), y, marks, keys)


def _changed(run: Progress) -> Panel:
    y = svg.linear(_ys([run.changed]), percent, zero=True)
    now = percent(run.changed[-1][1]) if run.changed else "none yet"
    x, marks = _version_axis([run.changed]), _filled("share", run.changed)
    return Panel("Weights changed", "share per version", now, x, y, marks)


def _lags(run: Progress) -> Panel:
    lines = [r.lags for r in run.replicas]
    y = svg.logarithmic(_ys(lines), duration)
    marks = [Mark("dots", colour(at), points) for at, points in enumerate(lines)]
    keys = [(colour(at), r.name) for at, r in enumerate(run.replicas)]
    now = "none yet" if run.lag_s is None else duration(run.lag_s)
    return Panel("Time to serving", "hand-over to commit", now, _version_axis(lines), y, marks, keys)


def _pauses(run: Progress) -> Panel:
    y = svg.logarithmic(_ys([run.pauses]), lambda ms: duration(ms / 1000))
    now = "none yet" if run.pause_ms is None else duration(run.pause_ms / 1000)
    x, marks = _version_axis([run.pauses]), [Mark("dots", "pause", run.pauses)]
    return Panel("Pause", "while generation stood still, slowest replica", now, x, y, marks)


_PANELS = (_reward, _versions, _payload, _games, _lags, _saved, _staleness, _pauses, _changed)


def _filled(css: str, points: Series) -> list[Mark]:
    return [Mark("area", css, points), Mark("line", css, points)]


def _steps(points: Series) -> svg.Axis:
    return svg.whole(_xs([points]), lambda step: f"{step:.0f}")


def _version_axis(lines: Iterable[Series]) -> svg.Axis:
    return svg.whole(_xs(lines), lambda version: f"v{count_text(version)}")


def _until(points: Series, t: float) -> Sequence[Point]:
    return (*points, (t, points[-1][1])) if points else ()


def _xs(lines: Iterable[Sequence[Point]]) -> list[float]:
    return [x for points in lines for x, _ in points]


def _ys(lines: Iterable[Sequence[Point]]) -> list[float]:
    return [y for points in lines for _, y in points]
