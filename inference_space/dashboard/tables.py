"""The tables of the page: every replica, and the last syncs."""

from __future__ import annotations

from html import escape

from inference_space.dashboard.panels import colour
from inference_space.dashboard.view import Progress, Replica, Slowest
from inference_space.dashboard.words import duration, number, percent, plural, size
from shared.runlog import SyncEvent


def tables(run: Progress) -> str:
    """Both tables."""
    return _replicas(run) + _syncs(run)


def _replicas(run: Progress) -> str:
    if not run.replicas:
        return _card("Replicas", "", "<p>No replica has reported yet.</p>")
    rows = "".join(_replica(at, replica) for at, replica in enumerate(run.replicas))
    heads = ("replica", "state", "version", "lag", "to serving", "bits equal the trainer's", "last error")
    return _card("Replicas", "", _table(heads, rows))


def _replica(at: int, replica: Replica) -> str:
    match replica.digest_ok:
        case None:
            equal = '<span class="mute">not checked</span>'
        case ok:
            equal = f'<span class="{"yes" if ok else "no"}">{"yes" if ok else "no"}</span>'
    cells = (
        f'<b class="{colour(at)}">{escape(replica.name)}</b>',
        escape(replica.state),
        "none" if replica.version is None else f"v{replica.version}",
        _behind(replica.behind),
        "" if replica.lag_s is None else duration(replica.lag_s),
        f"{equal} <code>{replica.digest or ''}</code>",
        f'<span class="error">{escape(replica.error or "")}</span>',
    )
    return _row(cells)


def _behind(versions: int | None) -> str:
    if versions is None:
        return ""
    return "current" if versions <= 0 else f"{plural(versions, 'version')} behind"


_STEPS = ("diff", "encode", "publish", "fetch", "stage", "commit", "pause")
_BAR = {"diff", "publish", "fetch", "stage", "pause"}  # publish holds encode, pause holds commit


def _syncs(run: Progress) -> str:
    spans = [_spans(sync, slow) for sync, slow in run.syncs]
    longest = max((sum(seconds for _, seconds in span) for span in spans), default=0) or 1
    rows = "".join(
        _sync(sync, slow, _bar(span, longest)) for (sync, slow), span in zip(run.syncs, spans, strict=True)
    )
    steps = (f'<b class="{step}">{step}</b>' if step in _BAR else step for step in _STEPS)
    about = "fetch, stage, commit and pause are the slowest replica's"
    return _card("Last syncs", about, _table(("version", "changed", "payload", *steps, ""), rows))


def _sync(sync: SyncEvent, slow: Slowest | None, bar: str) -> str:
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
        bar,
    )
    return _row(cells)


Span = tuple[str, float]


def _spans(sync: SyncEvent, slow: Slowest | None) -> list[Span]:
    spans = [("diff", sync.diff_s), ("publish", sync.publish_s)]
    if slow:
        spans += [("fetch", slow.fetch_s), ("stage", slow.stage_s), ("pause", slow.pause_ms / 1000)]
    return spans


def _bar(spans: list[Span], longest: float) -> str:
    parts = "".join(
        f'<u class="{name}" style="width:{100 * seconds / longest:.1f}%"></u>' for name, seconds in spans
    )
    words = ", ".join(f"{name} {duration(seconds)}" for name, seconds in spans)
    return f'<div class="bar" title="{words}">{parts}</div>'


def _table(heads: tuple[str, ...], rows: str) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _row(cells: tuple[str, ...]) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _card(title: str, about: str, inside: str) -> str:
    return f'<section class="card"><h2>{title}</h2><p>{about}</p>{inside}</section>'
