"""What `make demo` prints: the run's events as lines while it runs, and a table of figures at the end."""

import time
from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import Any

from delta_weight_sync.errors import printable
from delta_weight_sync.runlog import CommitEvent, DoneEvent, Event, ReplicaEvent, StepEvent, SyncEvent
from delta_weight_sync.util import size_text
from trainer.demo.processes import ChildError

_QUIET_S = 3.0
_ENOUGH = 40  # with fewer steps, the rewards of the first and the last tenth are mostly chance


class Progress:
    """Prints the run's events as lines; a step only if the last line is at least three seconds old."""

    def __init__(self, minutes: float) -> None:
        self._started, self._all_s = time.monotonic(), 60 * minutes
        self._said = 0.0  # when the last line was printed
        self.events: list[Event] = []
        self._serving, self._state = "none", ""  # of the replica: its version, and its state

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
            match event:
                case SyncEvent(version=0, payload_bytes=size):
                    self.say(f"version 0 is in the bucket ({size_text(size)}, the whole policy)")
                case CommitEvent(version=version):
                    self._serving = f"v{version}"
                case ReplicaEvent(version=None, error=error, state=state) if error and state != "unreachable":
                    raise ChildError(f"the replica cannot serve: {printable(error)}")
                case ReplicaEvent(state=state) if state != self._state:
                    self._state = state
                    self.say(f"replica: {state}")
                case StepEvent(reward=reward) if reward is not None and self.seconds >= self._said + _QUIET_S:
                    sync = next(e for e in reversed(self.events) if isinstance(e, SyncEvent))
                    share, payload = 100 * sync.changed / sync.total, size_text(sync.payload_bytes)
                    versions = f"trainer v{sync.version}, replica {self._serving}"
                    changed = f"{payload}, {share:.2f} % changed  {self.left_s:.0f} s left"
                    self.say(f"step {event.step:4}  reward {reward:6.3f}  {versions}  {changed}")
                case DoneEvent(version=version):
                    self.say(f"trained; the last version is {version}")


def summarize(events: Sequence[Event], model: str, seconds: float) -> dict[str, Any]:
    """Derive all figures of a finished run from its log. `seconds` is the duration of the whole demo.

    `verified` is true only if every replica has the trainer's last version, with the trainer's digest.
    Rewards are means over the first and the last tenth of the steps. Figures of a sync are medians.
    """
    syncs = [e for e in events if isinstance(e, SyncEvent)]
    deltas = [sync for sync in syncs if sync.version and sync.changed]
    commits = [e for e in events if isinstance(e, CommitEvent) and not e.joined]
    held = {e.replica: (e.version, e.digest) for e in events if isinstance(e, ReplicaEvent)}
    done = next((e for e in reversed(events) if isinstance(e, DoneEvent)), None)
    rewards = [e.reward for e in events if isinstance(e, StepEvent) and e.reward is not None]
    tenth = max(1, len(rewards) // 10)
    medians = {"changed": [sync.changed / sync.total for sync in deltas]}
    medians |= {name: [getattr(e, name) for e in deltas] for name in ("payload_bytes", "publish_s")}
    medians |= {name: [getattr(e, name) for e in commits] for name in ("pause_ms", "commit_ms", "lag_s")}
    return {
        "model": model,
        "syncs": max(0, len(syncs) - 1),  # without version 0, which is published before the first step
        "full_bytes": max((sync.full_bytes for sync in syncs), default=0),
        "steps": len(rewards),
        "reward_first": mean(rewards[:tenth] or [0.0]),
        "reward_last": mean(rewards[-tenth:] or [0.0]),
        "seconds": seconds,
        "stopped_by": done.stopped_by if done else None,
        "digest": done.digest if done else None,
        "replicas": held,
        "verified": done is not None and {*held.values()} == {(done.version, done.digest)},
        **{name: median(values or [0.0]) for name, values in medians.items()},
    }


def table(summary: dict[str, Any]) -> str:
    s, full, payload = summary, summary["full_bytes"], summary["payload_bytes"]
    few = ", too few steps to judge" if s["steps"] < _ENOUGH else ""
    limit = "step limit" if s["stopped_by"] == "steps" else "time limit"
    smaller = f", 1/{full / payload:.0f} of a full sync" if payload else ""
    rows = {
        "model": f"{s['model']}, {size_text(full)} in bf16",
        "time": f"{s['seconds']:.0f} s; ended by its {limit}",
        "syncs": f"{s['syncs']} in {s['steps']} steps",
        "reward": f"{s['reward_first']:.3f} -> {s['reward_last']:.3f}{few}",
        "changed per sync": f"{100 * s['changed']:.2f} % of the weights (medians, here and below)",
        "payload per sync": size_text(payload) + smaller,
        "pause": f"{s['pause_ms']:.1f} ms, {s['commit_ms']:.1f} ms of it the commit",
        "after a step": f"in the bucket in {s['publish_s']:.2f} s, in the replica in {s['lag_s']:.2f} s",
        "trainer digest": s["digest"],
        "replicas": ", ".join(f"{name} at v{v} ({digest})" for name, (v, digest) in s["replicas"].items()),
        "verified": "yes: live weights equal the trainer's" if s["verified"] else "NO",
    }
    return "\n".join(f"  {name:18} {value}" for name, value in rows.items())
