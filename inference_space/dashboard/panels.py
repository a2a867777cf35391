"""The charts of the page: is it learning, is every replica current, what did a sync cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from inference_space.dashboard import svg
from inference_space.dashboard.series import Point, Series
from inference_space.dashboard.svg import Mark
from inference_space.dashboard.view import Progress, Replica
from inference_space.dashboard.words import behind, duration, number, percent, size

COLOURS = 6  # of replicas, before they repeat


def panels(run: Progress) -> str:
    """All charts."""
    return f'<section class="panels">{"".join(draw(run) for draw in _PANELS)}</section>'


def colour(index: int) -> str:
    """The class that colours the replica at `index`."""
    return f"r{index % COLOURS}"


def _versions(run: Progress) -> str:
    lines = [("trainer", "trainer", _until(run.trainer, run.last_t))]
    lines += [(r.name, colour(at), _until(r.versions, run.last_t)) for at, r in enumerate(run.replicas)]
    x = svg.ago(run.trainer[0][0], run.last_t, duration)
    y = svg.whole(_ys(points for *_, points in lines), lambda version: f"v{version:.0f}")
    marks = [Mark("step", css, points) for _, css, points in (lines[0], *reversed(lines[1:]))]
    keys = '<b class="trainer">trainer</b>' + "".join(_behind(at, r) for at, r in enumerate(run.replicas))
    about = "the trainer's, and each replica's after it"
    return _panel("Versions", about, f"v{run.version}", x, y, marks, keys)


def _behind(at: int, replica: Replica) -> str:
    words = "serves none" if replica.behind is None else behind(replica.behind)
    return f'<b class="{colour(at)}">{escape(replica.name)}: {words}</b>'


def _reward(run: Progress) -> str:
    trend = svg.smooth(run.reward)
    marks = [Mark("dots", "faint", run.reward), Mark("line", "good", trend)]
    x = svg.whole(_xs([run.reward]), lambda step: f"{step:.0f}")
    y = svg.linear(_ys([run.reward]), lambda value: f"{value:.2g}")
    now = "none yet" if run.reward_lately is None else f"{run.reward_lately:.2f}"
    return _panel("Reward", "of each optimizer step, and its trend", now, x, y, marks)


def _games(run: Progress) -> str:
    marks = [Mark("line", "good", svg.smooth(run.solved)), Mark("line", "bad", svg.smooth(run.invalid))]
    marks.insert(0, Mark("dots", "faint", run.solved))
    x = svg.whole(_xs([run.solved]), lambda step: f"{step:.0f}")
    y = svg.linear([*_ys([run.solved, run.invalid])], percent, zero=True)
    now = percent(run.solved[-1][1]) if run.solved else "none yet"
    keys = '<b class="good">games solved</b><b class="bad">guesses that are no word</b>'
    return _panel("Solved", "of the games of each step", now, x, y, marks, keys)


def _staleness(run: Progress) -> str:
    marks = [Mark("area", "share", run.staleness), Mark("line", "share", run.staleness)]
    x = svg.whole(_xs([run.staleness]), lambda step: f"{step:.0f}")
    y = svg.linear(_ys([run.staleness]), lambda value: f"{value:.2g}", zero=True)
    now = f"{run.staleness[-1][1]:.2g}" if run.staleness else "none yet"
    about = "of the samples used: syncs since their oldest weights"
    return _panel("Staleness", about, now, x, y, marks)


def _saved(run: Progress) -> str:
    marks = [Mark("area", "delta", run.saved), Mark("line", "delta", run.saved)]
    y = svg.linear(_ys([run.saved]), size, zero=True)
    now = size(run.sent_full_bytes - run.sent_bytes) if run.saved else "none yet"
    about = "against all weights at every sync, summed up"
    return _panel("Bytes saved", about, now, _version_axis([run.saved]), y, marks)


def _payload(run: Progress) -> str:
    full: Series = ((0, run.full_bytes), (max(1, run.version), run.full_bytes))
    marks = [
        Mark("line", "limit", full),
        Mark("area", "delta", run.deltas),
        Mark("line", "delta", run.deltas),
        Mark("dots", "anchor", run.anchors),
    ]
    y = svg.logarithmic(_ys([full, run.deltas, run.anchors]), size)
    keys = '<b class="delta">delta</b><b class="anchor">anchor</b><b class="limit">all weights</b>'
    now = "none yet" if run.payload_bytes is None else size(run.payload_bytes)
    return _panel("Payload", "bytes per version", now, _version_axis([full]), y, marks, keys)


def _changed(run: Progress) -> str:
    y = svg.linear(_ys([run.changed]), percent, zero=True)
    marks = [Mark("area", "share", run.changed), Mark("line", "share", run.changed)]
    now = percent(run.changed[-1][1]) if run.changed else "none yet"
    return _panel("Weights changed", "share per version", now, _version_axis([run.changed]), y, marks)


def _lags(run: Progress) -> str:
    lines = [r.lags for r in run.replicas]
    y = svg.logarithmic(_ys(lines), duration)
    marks = [Mark("dots", colour(at), points) for at, points in enumerate(lines)]
    keys = "".join(f'<b class="{colour(at)}">{escape(r.name)}</b>' for at, r in enumerate(run.replicas))
    now = "none yet" if run.lag_s is None else duration(run.lag_s)
    return _panel("Time to serving", "hand-over to commit", now, _version_axis(lines), y, marks, keys)


def _pauses(run: Progress) -> str:
    y = svg.logarithmic(_ys([run.pauses]), lambda ms: duration(ms / 1000))
    now = "none yet" if run.pause_ms is None else duration(run.pause_ms / 1000)
    marks = [Mark("dots", "pause", run.pauses)]
    about = "while generation stood still, slowest replica"
    return _panel("Pause", about, now, _version_axis([run.pauses]), y, marks)


_PANELS = (_reward, _versions, _payload, _games, _lags, _saved, _staleness, _pauses, _changed)


def _panel(
    title: str, about: str, now: str, x: svg.Axis, y: svg.Axis, marks: list[Mark], keys: str = ""
) -> str:
    return (
        f"<figure><figcaption><h2>{title}</h2><output>{now}</output><p>{about}</p></figcaption>"
        f'{svg.chart(x, y, marks)}<div class="keys">{keys}</div></figure>'
    )


def _version_axis(lines: Iterable[Series]) -> svg.Axis:
    return svg.whole(_xs(lines), lambda version: f"v{number(version)}")


def _until(points: Series, t: float) -> Sequence[Point]:
    return (*points, (t, points[-1][1])) if points else ()


def _xs(lines: Iterable[Sequence[Point]]) -> list[float]:
    return [x for points in lines for x, _ in points]


def _ys(lines: Iterable[Sequence[Point]]) -> list[float]:
    return [y for points in lines for _, y in points]
