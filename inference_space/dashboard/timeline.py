"""The last syncs on one clock: from the hand-over at the trainer to the commit at the slowest replica."""

from __future__ import annotations

from delta_weight_sync.runlog import SyncEvent
from inference_space.dashboard import svg
from inference_space.dashboard.view import Progress, Slowest
from inference_space.dashboard.words import duration

Span = tuple[str, float, float]  # what, from, until: seconds since the hand-over

_WORDS = {
    "diff": "diff: the trainer waits",
    "publish": "publish",
    "idle": "until the replica looks",
    "fetch": "fetch",
    "stage": "stage",
    "pause": "commit: generation waits",
}


def timeline(run: Progress) -> str:
    """One bar per sync, newest first; all on the same scale."""
    rows = [(sync, spans(sync, slow)) for sync, slow in run.syncs if sync.version]
    if not rows:
        return ""
    longest = max(end for _, found in rows for *_, end in found)
    axis = svg.linear([longest], duration, zero=True)
    ticks = "".join(f'<i style="left:{100 * axis.place(at):.1f}%">{word}</i>' for at, word in axis.ticks)
    keys = "".join(f'<b class="{name}">{words}</b>' for name, words in _WORDS.items())
    bars = "".join(_bar(sync, found, axis) for sync, found in rows)
    about = "seconds since the trainer handed the weights over, until the last replica serves them"
    return (
        f'<section class="card"><h2>One sync after the other</h2><p>{about}</p>'
        f'<ol class="clock">{bars}<li class="ticks">{ticks}</li></ol><div class="keys">{keys}</div></section>'
    )


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


def _bar(sync: SyncEvent, found: list[Span], axis: svg.Axis) -> str:
    parts = "".join(
        f'<u class="{name}" style="left:{100 * axis.place(start):.2f}%;'
        f'width:{100 * (axis.place(end) - axis.place(start)):.2f}%"></u>'
        for name, start, end in found
    )
    words = ", ".join(f"{name} {duration(end - start)}" for name, start, end in found)
    bar = f'<div role="img" aria-label="{words}">{parts}</div>'
    return f'<li title="{words}"><span>v{sync.version}</span>{bar}</li>'
