"""What `make demo` prints while it runs: the run's events as lines."""

from __future__ import annotations

import time
from collections.abc import Iterable

from delta_weight_sync.errors import printable
from delta_weight_sync.runlog import CommitEvent, DoneEvent, Event, ReplicaEvent, StepEvent, SyncEvent
from trainer.processes import ChildError


class Progress:
    """Turns the run's events into lines, not more than one per ten steps."""

    def __init__(self, minutes: float) -> None:
        """The time that there is runs from now on."""
        self._started, self._all_s = time.monotonic(), 60 * minutes
        self.events: list[Event] = []
        self._syncs: dict[int, SyncEvent] = {}
        self._serving: int | None = None
        self._state = ""

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        """What is left of the time, at least 0."""
        return max(0.0, self._all_s - self.seconds)

    @property
    def newest(self) -> int | None:
        """The newest version; None before the first."""
        return max(self._syncs, default=None)

    def say(self, line: str) -> None:
        """Print with the seconds since the start."""
        print(f"[{self.seconds:6.1f} s] {printable(line)}", flush=True)

    def show(self, events: Iterable[Event]) -> None:
        """Take in new events and say what matters."""
        for event in events:
            self.events.append(event)
            if isinstance(event, SyncEvent):
                self._syncs[event.version] = event
                if event.version == 0:
                    self.say(
                        f"version 0 is in the bucket ({event.payload_bytes / 1e6:.2f} MB, the whole policy)"
                    )
            elif isinstance(event, CommitEvent):
                self._serving = event.version
            elif isinstance(event, ReplicaEvent):
                self._replica(event)
            elif isinstance(event, StepEvent) and event.step % 10 == 0:
                self._step(event)
            elif isinstance(event, DoneEvent):
                self.say(f"trained; the last version is {event.version}")

    def _replica(self, event: ReplicaEvent) -> None:
        if event.error and event.version is None and event.state != "unreachable":
            raise ChildError(f"the replica cannot serve: {printable(event.error)}")
        if event.state != self._state:
            self._state = event.state
            self.say(f"replica: {event.state}")

    def _step(self, event: StepEvent) -> None:
        newest = self._syncs[max(self._syncs)]
        versions = f"trainer v{newest.version}, replica v{self._serving}"
        payload = f"{newest.payload_bytes / 1e3:.1f} KB, {100 * newest.changed / newest.total:.2f} % changed"
        left = f"{self.left_s:.0f} s left"
        self.say(f"step {event.step:4}  reward {event.reward:6.3f}  {versions}  {payload}  {left}")
