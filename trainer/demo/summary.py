"""What `make demo` prints: the run's events as lines while it runs, and a table of figures at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import Any

from delta_weight_sync.errors import printable
from delta_weight_sync.runlog import CommitEvent, DoneEvent, Event, ReplicaEvent, StepEvent, SyncEvent
from delta_weight_sync.util import size_text
from trainer.demo.processes import ChildError

_QUIET_S = 10.0
_ENOUGH = 40  # with fewer steps, the rewards of the first and the last tenth are mostly chance


class Progress:
    """Prints the run's events as lines: every tenth step, and any step after 10 seconds without a line."""

    def __init__(self, minutes: float) -> None:
        self._started, self._all_s = time.monotonic(), 60 * minutes
        self._said = 0.0  # when the last line was printed
        self.events: list[Event] = []
        self.newest: int | None = None  # version; None before the first
        self._sync: SyncEvent  # of that version
        self._serving: int | None = None
        self._state = ""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        return max(0.0, self._all_s - self.seconds)

    def say(self, line: str) -> None:
        self._said = self.seconds
        print(f"[{self.seconds:6.1f} s] {printable(line)}", flush=True)

    def show(self, events: Iterable[Event]) -> None:
        for event in events:
            self.events.append(event)
            if isinstance(event, SyncEvent):
                self.newest, self._sync = event.version, event
                if event.version == 0:
                    size = size_text(event.payload_bytes)
                    self.say(f"version 0 is in the bucket ({size}, the whole policy)")
            elif isinstance(event, CommitEvent):
                self._serving = event.version
            elif isinstance(event, ReplicaEvent):
                if event.error and event.version is None and event.state != "unreachable":
                    raise ChildError(f"the replica cannot serve: {printable(event.error)}")
                if event.state != self._state:
                    self._state = event.state
                    self.say(f"replica: {event.state}")
            elif isinstance(event, StepEvent) and event.reward is not None:
                if event.step % 10 == 0 or self.seconds > self._said + _QUIET_S:
                    self._step(event)
            elif isinstance(event, DoneEvent):
                self.say(f"trained; the last version is {event.version}")

    def _step(self, event: StepEvent) -> None:
        sync = self._sync
        versions = f"trainer v{sync.version}, replica v{self._serving}"
        payload = f"{sync.payload_bytes / 1e3:.1f} KB, {100 * sync.changed / sync.total:.2f} % changed"
        left = f"{self.left_s:.0f} s left"
        self.say(f"step {event.step:4}  reward {event.reward:6.3f}  {versions}  {payload}  {left}")


def summarize(events: Sequence[Event], model: str, seconds: float) -> dict[str, Any]:
    """Derive all figures of a finished run from its log. `seconds` is the duration of the whole demo.

    `verified` is true only if every replica's live digest equals the trainer's at the same version. Rewards
    are means over the first and the last tenth of the steps.
    """
    syncs = {e.version: e for e in events if isinstance(e, SyncEvent)}
    commits = {e.version: e for e in events if isinstance(e, CommitEvent) and not e.joined}
    replicas = {e.replica: e for e in events if isinstance(e, ReplicaEvent)}
    held = {(r.version, r.digest) for r in replicas.values()}
    done = next((e for e in reversed(events) if isinstance(e, DoneEvent)), None)
    rewards = [e.reward for e in events if isinstance(e, StepEvent) and e.reward is not None]
    tenth = max(1, len(rewards) // 10)
    versions = []
    for version, sync in sorted(syncs.items()):
        names = {"version", "payload_bytes", "anchor_bytes", "changed", "diff_s", "publish_s"}
        figures = sync.model_dump(include=names) | {"sparsity": 1 - sync.changed / sync.total}
        commit = commits.get(version)  # None if no replica committed a delta to this version
        versions.append(figures | {n: getattr(commit, n, None) for n in ("pause_ms", "commit_ms", "lag_s")})
    return {
        "model": model,
        "syncs": len(syncs) - 1 if syncs else 0,  # version 0 is the base, not a sync
        "full_bytes": max((s.full_bytes for s in syncs.values()), default=0),
        "steps": len(rewards),
        "reward_first": mean(rewards[:tenth]) if rewards else None,
        "reward_last": mean(rewards[-tenth:]) if rewards else None,
        "seconds": seconds,
        "stopped_by": done.stopped_by if done else None,
        "digest": done.digest if done else None,
        "replicas": [
            {"name": name, "version": r.version, "digest": r.digest} for name, r in replicas.items()
        ],
        "verified": done is not None and held == {(done.version, done.digest)},
        "versions": versions,
    }


def table(summary: dict[str, Any]) -> str:
    deltas = [v for v in summary["versions"] if v["version"] > 0 and v["changed"]]
    few = ", too few steps to judge" if summary["steps"] < _ENOUGH else ""
    limit = "step limit" if summary["stopped_by"] == "steps" else "time limit"
    rows = [
        ("model", f"{summary['model']}, {size_text(summary['full_bytes'])} in bf16"),
        ("time", f"{summary['seconds']:.0f} s; ended by its {limit}"),
        ("syncs", f"{summary['syncs']} in {summary['steps']} steps"),
        ("reward", f"{summary['reward_first']:.3f} -> {summary['reward_last']:.3f}{few}"),
    ]
    if deltas:
        known = {name: [v[name] for v in deltas if v[name] is not None] for name in deltas[0]}
        middle = {name: median(values) if values else 0.0 for name, values in known.items()}
        share, payload = 100 * (1 - middle["sparsity"]), middle["payload_bytes"]
        publish = "{publish_s:.2f} s; to the replica's commit {lag_s:.2f} s"
        smaller = f"1/{summary['full_bytes'] / payload:.0f} of a full sync"
        rows += [
            ("changed per sync", f"{share:.2f} % of the weights (medians, here and below)"),
            ("payload per sync", f"{size_text(payload)}, {smaller}"),
            ("pause", "{pause_ms:.0f} ms, {commit_ms:.1f} ms of it the commit".format_map(middle)),
            ("hand-over to HEAD", publish.format_map(middle)),
        ]
    serving = ", ".join(f"{r['name']} at v{r['version']} ({r['digest']})" for r in summary["replicas"])
    rows += [("trainer digest", str(summary["digest"])), ("replicas", serving)]
    rows += [("verified", "yes: live weights equal the trainer's" if summary["verified"] else "NO")]
    return "\n".join(f"  {name:18} {value}" for name, value in rows)
