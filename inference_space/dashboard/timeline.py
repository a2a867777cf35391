"""The last syncs on one clock: from the hand-over at the trainer to the commit at the slowest replica."""

from __future__ import annotations

from dataclasses import dataclass

from delta_weight_sync.runlog import SyncEvent
from inference_space.dashboard import svg
from inference_space.dashboard.formatting import duration
from inference_space.dashboard.view import Progress, Slowest

Span = tuple[str, float, float]  # what, from, until: seconds since the hand-over

_WORDS = {
    "diff": "diff: the trainer waits",
    "publish": "publish",
    "idle": "until the replica looks",
    "fetch": "fetch",
    "stage": "stage",
    "pause": "commit: generation waits",
}


@dataclass(frozen=True)
class Timeline:
    """One bar per sync, newest first; all on the same scale."""

    rows: list[tuple[int, str, list[tuple[str, str, str]]]]  # version, in words, name and place of each part
    axis: svg.Axis
    keys = tuple(_WORDS.items())


def timeline(run: Progress) -> Timeline | None:
    """The last syncs of a run; None before the first delta."""
    rows = [(sync.version, spans(sync, slow)) for sync, slow in run.syncs if sync.version]
    if not rows:
        return None
    axis = svg.linear([max(end for _, found in rows for *_, end in found)], duration, zero=True)
    return Timeline([(version, _words(found), _bars(found, axis)) for version, found in rows], axis)


def _words(found: list[Span]) -> str:
    return ", ".join(f"{name} {duration(end - start)}" for name, start, end in found)


def _bars(found: list[Span], axis: svg.Axis) -> list[tuple[str, str, str]]:
    places = [(name, 100 * axis.place(start), 100 * axis.place(end)) for name, start, end in found]
    return [(name, f"{left:.2f}%", f"{right - left:.2f}%") for name, left, right in places]


def spans(sync: SyncEvent, slow: Slowest | None) -> list[Span]:
    """Where each part of a sync lies; the replica's parts end with its commit."""
    found = [("diff", 0.0, sync.diff_s), ("publish", sync.diff_s, max(sync.diff_s, sync.publish_s))]
    if slow is None:
        return found
    last = slow.last
    end = max(last.lag_s, last.pause_ms / 1000)
    stage_end = end - last.pause_ms / 1000
    fetch_end = max(0.0, stage_end - last.stage_s)
    fetch_start = max(0.0, fetch_end - last.fetch_s)
    if fetch_start > sync.publish_s:
        found.append(("idle", sync.publish_s, fetch_start))
    return [
        *found,
        ("fetch", fetch_start, fetch_end),
        ("stage", fetch_end, stage_end),
        ("pause", stage_end, end),
    ]
