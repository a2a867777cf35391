"""The run in words: what is served, what a sync costs, what it saved."""

from __future__ import annotations

from inference_space.dashboard.fold import LATELY
from inference_space.dashboard.view import Progress
from inference_space.dashboard.words import duration, plural, size


def headline(run: Progress) -> str:
    """The first lines of the page and the tiles under them."""
    return f'<h1>{_serving(run)}</h1><p class="lead">{_lead(run)}</p>{_done(run)}{_tiles(run)}'


def _serving(run: Progress) -> str:
    if not run.replicas:
        return f"v{run.version} published, no replica has reported yet"
    current = sum(replica.version == run.version for replica in run.replicas)
    return f"v{run.version} serving on {current}/{plural(len(run.replicas), 'replica')}"


def _lead(run: Progress) -> str:
    parts = []
    if run.payload_bytes is not None:
        parts.append(f"<b>{size(run.payload_bytes)}</b> per sync instead of <b>{size(run.full_bytes)}</b>")
    if run.pause_ms is not None:
        parts.append(f"paused <b>{duration(run.pause_ms / 1000)}</b> (median)")
    return " · ".join(parts)


def _done(run: Progress) -> str:
    if run.done is None:
        return ""
    proof = _PROOF[run.done_ok]
    return (
        f'<p class="done">Training ended at v{run.done.version}; the trainer\'s own parameters are '
        f"<b>{proof}</b> <code>{run.done.digest}</code>.</p>"
    )


def _tiles(run: Progress) -> str:
    tiles = (_reward(run), _payload(run), _saved(run), _pause(run), _lag(run))
    cells = (f"<div><dt>{name}</dt><dd>{value}</dd><dd>{about}</dd></div>" for name, value, about in tiles)
    return f"<dl>{''.join(cells)}</dl>"


Tile = tuple[str, str, str]
_NONE = "–"
_PROOF = {True: "exactly the published bits", False: "NOT the published bits", None: "not compared"}


def _reward(run: Progress) -> Tile:
    if run.reward_first is None or run.reward_lately is None:
        return "Reward", _NONE, "no step yet"
    return "Reward", f"{run.reward_lately:.2f}", f"last {LATELY} steps; {run.reward_first:.2f} at first"


def _payload(run: Progress) -> Tile:
    if not run.payload_bytes:
        return "Per sync", _NONE, "no delta yet"
    times = run.full_bytes / run.payload_bytes
    return "Per sync", size(run.payload_bytes), f"{times:.3g} times less than {size(run.full_bytes)}"


def _saved(run: Progress) -> Tile:
    saved = run.sent_full_bytes - run.sent_bytes
    if saved <= 0:
        return "Saved", _NONE, "no delta yet"
    sent, full = size(run.sent_bytes), size(run.sent_full_bytes)
    return "Saved", size(saved), f"sent {sent}, not {full}"


def _pause(run: Progress) -> Tile:
    if run.pause_ms is None or run.worst_pause_ms is None:
        return "Pause", _NONE, "no commit yet"
    return (
        "Pause",
        duration(run.pause_ms / 1000),
        f"median; longest {duration(run.worst_pause_ms / 1000)}",
    )


def _lag(run: Progress) -> Tile:
    if run.lag_s is None:
        return "To serving", _NONE, "no commit yet"
    return "To serving", duration(run.lag_s), "median, hand-over to commit"
