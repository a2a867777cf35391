"""A run in figures, derived from its log in the bucket: what `make demo` prints and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import mean, median, stdev
from typing import Any

from delta_weight_sync.runlog import CommitEvent, DoneEvent, Event, ReplicaEvent, StepEvent, SyncEvent
from delta_weight_sync.units import size_text

_SURE = 1.96  # standard errors to each side hold the truth 95 times of 100


def summarize(
    events: Sequence[Event], model: str, held_out: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """All figures of a finished run. `verified` is true only when every replica's live digest equals the
    trainer's at the same version. Rewards are means over the first and the last tenth of the steps;
    `held_out` is what `trainer.held_out` says was gained, `seconds` how long all of it took.
    """
    syncs = {e.version: e for e in events if isinstance(e, SyncEvent)}
    commits = {e.version: e for e in events if isinstance(e, CommitEvent) and not e.joined}
    replicas = {e.replica: e for e in events if isinstance(e, ReplicaEvent)}
    done = next((e for e in reversed(events) if isinstance(e, DoneEvent)), None)
    rewards = [e.reward for e in events if isinstance(e, StepEvent) and e.reward is not None]
    tenth = max(1, len(rewards) // 10)
    return {
        "model": model,
        "syncs": len(syncs) - 1 if syncs else 0,  # version 0 is the base, not a sync
        "full_bytes": max((s.full_bytes for s in syncs.values()), default=0),
        "steps": len(rewards),
        "reward_first": sum(rewards[:tenth]) / tenth if rewards else None,
        "reward_last": sum(rewards[-tenth:]) / tenth if rewards else None,
        "solved_held_out": held_out,
        "seconds": seconds,
        "stopped_by": done.stopped_by if done else None,
        "digest": done.digest if done else None,
        "replicas": [
            {"name": r.replica, "version": r.version, "digest": r.digest} for r in replicas.values()
        ],
        "verified": bool(done and replicas)
        and all((r.version, r.digest) == (done.version, done.digest) for r in replicas.values()),
        "versions": [_version(sync, commits.get(version)) for version, sync in sorted(syncs.items())],
    }


def _version(sync: SyncEvent, commit: CommitEvent | None) -> dict[str, Any]:
    return {
        "version": sync.version,
        "payload_bytes": sync.payload_bytes,
        "anchor_bytes": sync.anchor_bytes,
        "changed": sync.changed,
        "sparsity": 1.0 - sync.changed / sync.total,
        "diff_s": sync.diff_s,
        "publish_s": sync.publish_s,
        # None for a version that no replica patched in: it joined with it, or went on to a newer one
        "pause_ms": commit.pause_ms if commit else None,
        "commit_ms": commit.commit_ms if commit else None,
        "lag_s": commit.lag_s if commit else None,
    }


def gain(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """Means of what the same tasks were worth, 0 to 1, and the 95 % interval of their difference."""
    gains = [later - earlier for earlier, later in zip(before, after, strict=True)]
    middle, reach = mean(gains), _SURE * stdev(gains) / sqrt(len(gains))
    return {
        "before": mean(before),
        "after": mean(after),
        "games": len(gains),
        "interval": [middle - reach, middle + reach],
    }


def learned(held_out: Mapping[str, Any], what: str) -> str:
    """One line: `what` before and after training, and how sure that is."""
    low, high = (100 * bound for bound in held_out["interval"])
    return (
        f"{what}: {100 * held_out['before']:.1f} % -> {100 * held_out['after']:.1f} %"
        f" of {held_out['games']} ({low:+.1f} to {high:+.1f} points with 95 % confidence)"
    )


def table(summary: dict[str, Any], what: str) -> str:
    """The figures of `summarize` as lines for a terminal; `what` was counted on held-out tasks."""
    deltas = [v for v in summary["versions"] if v["version"] > 0 and v["changed"]]
    limit = "its steps" if summary["stopped_by"] == "steps" else "the time"
    rows = [
        ("model", f"{summary['model']}, {size_text(summary['full_bytes'])} in bf16"),
        ("time", f"{summary['seconds']:.0f} s; {limit} ended it"),
        ("syncs", f"{summary['syncs']} in {summary['steps']} steps"),
        ("reward", f"{summary['reward_first']:.3f} -> {summary['reward_last']:.3f}"),
        ("learned", learned(summary["solved_held_out"], what)),
    ]
    if deltas:
        payload = _median(deltas, "payload_bytes")
        share = 100 * (1 - _median(deltas, "sparsity"))
        pause, commit = _median(deltas, "pause_ms"), _median(deltas, "commit_ms")
        publish, lag = _median(deltas, "publish_s"), _median(deltas, "lag_s")
        rows += [
            ("changed per sync", f"{share:.2f} % of the weights (medians, here and below)"),
            (
                "payload per sync",
                f"{size_text(payload)}, 1/{summary['full_bytes'] / payload:.0f} of a full sync",
            ),
            ("pause", f"{pause:.0f} ms, {commit:.1f} ms of it the commit"),
            ("hand-over to HEAD", f"{publish:.2f} s; to the replica's commit {lag:.2f} s"),
        ]
    serving = ", ".join(f"{r['name']} at v{r['version']} ({r['digest']})" for r in summary["replicas"])
    rows += [("trainer digest", str(summary["digest"])), ("replicas", serving)]
    rows += [("verified", "yes: live weights equal the trainer's" if summary["verified"] else "NO")]
    return "\n".join(f"  {name:18} {value}" for name, value in rows)


def _median(versions: list[dict[str, Any]], key: str) -> float:
    known = [version[key] for version in versions if version[key] is not None]
    return median(known) if known else 0.0
