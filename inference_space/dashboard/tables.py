"""The tables of the page: every replica, and the last syncs."""

from __future__ import annotations

from html import escape

from delta_weight_sync.runlog import SyncEvent
from inference_space.dashboard.panels import colour
from inference_space.dashboard.timeline import timeline
from inference_space.dashboard.view import Progress, Replica, Slowest
from inference_space.dashboard.words import behind, duration, number, percent, size


def tables(run: Progress) -> str:
    """Replicas, the last syncs on a clock, and the same in figures."""
    return _replicas(run) + timeline(run) + _syncs(run)


def _replicas(run: Progress) -> str:
    if not run.replicas:
        return card("Replicas", "", "<p>No replica has reported yet.</p>")
    rows = "".join(row(_replica(at, replica), _HEADS) for at, replica in enumerate(run.replicas))
    return card("Replicas", "", f'<div class="stack">{table(_HEADS, rows)}</div>')


_HEADS = ("replica", "state", "version", "lag", "to serving", "bits equal the trainer's", "last error")


def _replica(at: int, replica: Replica) -> tuple[str, ...]:
    match replica.digest_ok:
        case None:
            equal = '<span class="mute">not checked</span>'
        case ok:
            equal = f'<span class="{"yes" if ok else "no"}">{"yes" if ok else "no"}</span>'
    return (
        f'<b class="{colour(at)}">{escape(replica.name)}</b>',
        escape(replica.state),
        "none" if replica.version is None else f"v{replica.version}",
        "" if replica.behind is None else behind(replica.behind),
        "" if replica.lag_s is None else duration(replica.lag_s),
        f"{equal} <code>{replica.digest or ''}</code>",
        f'<span class="error">{escape(replica.error or "")}</span>',
    )


_STEPS = ("diff", "encode", "publish", "fetch", "stage", "commit", "pause")


def _syncs(run: Progress) -> str:
    rows = "".join(_sync(sync, slow) for sync, slow in run.syncs)
    about = "fetch, stage, commit and pause are the slowest replica's; publish holds diff and encode"
    return card("Last syncs", about, table(("version", "changed", "payload", *_STEPS), rows))


def _sync(sync: SyncEvent, slow: Slowest | None) -> str:
    share = sync.changed / max(1, sync.total)
    ours = (sync.diff_s, sync.encode_s, sync.publish_s)
    theirs = (
        (slow.fetch_s, slow.stage_s, slow.commit_ms / 1000, slow.pause_ms / 1000) if slow else (None,) * 4
    )
    anchor = f' <span class="mute">+ {size(sync.anchor_bytes)} anchor</span>' if sync.anchor_bytes else ""
    cells = (
        f"v{sync.version}",
        f'{percent(share)} <span class="mute">{number(sync.changed)}</span>' if sync.version else "all",
        size(sync.payload_bytes) + anchor,
        *("" if seconds is None else duration(seconds) for seconds in (*ours, *theirs)),
    )
    return row(cells)


def table(heads: tuple[str, ...], rows: str) -> str:
    """A table that scrolls sideways where the page is too narrow."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    inside = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="scroll" tabindex="0"><table>{inside}</table></div>'


def row(cells: tuple[str, ...], heads: tuple[str, ...] = ()) -> str:
    """One row of HTML cells; with `heads` each can be shown without the table's head, where it is narrow."""
    names = [f' data-head="{head}"' for head in heads] or [""] * len(cells)
    return f"<tr>{''.join(f'<td{name}>{cell}</td>' for name, cell in zip(names, cells, strict=True))}</tr>"


def card(title: str, about: str, inside: str) -> str:
    """A part of the page with a heading."""
    return f'<section class="card"><h2>{title}</h2><p>{about}</p>{inside}</section>'
