"""The state of a run, kept up to date event by event: each costs the same, however long the run is."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from delta_weight_sync.runlog import (
    CanaryEvent,
    CommitEvent,
    DoneEvent,
    Event,
    ReplicaEvent,
    StepEvent,
    SyncEvent,
)
from inference_space.dashboard.series import Curve, Point, Series, mean, median, since
from inference_space.dashboard.view import Progress, Replica, Slowest

ROWS = 12  # of the table of syncs
LATELY = 20  # steps
WINDOW = 24  # versions in the staircase
STEPS = 256  # of a replica's staircase
REPLICAS = 128  # that are shown: those that were heard of last
MEDIANS = 1 << 16  # values of which a median is kept exactly
UNSETTLED = 64  # versions that replicas may still be taking over
SOLVED, INVALID, STALENESS = "games/solve_rate", "games/invalid_rate", "sample/staleness_mean"


@dataclass
class _Track:
    state: str = "serving"
    version: int | None = None
    digest: str | None = None
    error: str | None = None
    signed_by: str | None = None
    lag_s: float | None = None
    versions: deque[Point] = field(default_factory=lambda: deque(maxlen=STEPS))  # in the staircase's window
    lags: Curve = field(default_factory=lambda: Curve(peaks=True))

    def moved_to(self, t: float, version: int | None) -> None:
        if not self.versions or version != self.version:
            self.versions.append((t, math.nan if version is None else version))
        self.version = version

    def forget(self, t: float) -> None:
        while len(self.versions) > 1 and self.versions[1][0] <= t:
            self.versions.popleft()


class RunState:
    """What is known of a run so far."""

    def __init__(self) -> None:
        self.digests: dict[int, str | None] = {}  # as published, where known; filled in by the reader
        self.version: int | None = None
        self.events = 0  # that were taken in
        self._last_t = 0.0
        self._done: DoneEvent | None = None
        self._recent: deque[SyncEvent] = deque(maxlen=ROWS)
        self._sent = self._sent_full = 0
        self._trainer: deque[Point] = deque(maxlen=WINDOW)
        self._deltas, self._changed, self._saved = Curve(), Curve(), Curve()
        self._anchors, self._pauses = Curve(peaks=True), Curve(peaks=True)
        self._anchored: deque[int] = deque(maxlen=ROWS)
        self._reward = Curve()
        self._first: list[float] = []
        self._lately: deque[float] = deque(maxlen=LATELY)
        self._metrics = {SOLVED: Curve(), INVALID: Curve(), STALENESS: Curve(peaks=True)}
        self._group: StepEvent | None = None
        self._slowest: dict[int, Slowest] = {}  # of the newest versions, by the order of their first commit
        self._canaries: dict[str, CanaryEvent] = {}  # the newest of each replica
        self._tracks: dict[str, _Track] = {}
        self._all_sizes, self._all_pauses, self._all_lags = (list[float]() for _ in range(3))  # sorted

    def add(self, events: Iterable[Event]) -> None:
        """Take in events, oldest first."""
        for event in events:
            self.events += 1
            self._last_t = max(self._last_t, event.t)
            match event:
                case SyncEvent():
                    self._sync(event)
                case StepEvent():
                    self._step(event)
                case ReplicaEvent():
                    self._replica(event)
                case CommitEvent():
                    self._commit(event)
                case CanaryEvent():
                    self._canaries[event.replica] = event
                case DoneEvent():
                    self._done = event

    def served(self) -> set[int]:
        """The versions whose digests are wanted."""
        served = {track.version for track in self._tracks.values() if track.version is not None}
        return served | ({self._done.version} if self._done else set())

    def progress(self) -> Progress | None:
        """The page's figures and curves; None before the first version."""
        if self.version is None:
            return None
        return Progress(
            version=self.version,
            last_t=self._last_t,
            done=self._done,
            done_ok=self._matches(self._done.version, self._done.digest) if self._done else None,
            full_bytes=self._recent[-1].full_bytes,
            payload_bytes=median(self._all_sizes),
            sent_bytes=self._sent,
            sent_full_bytes=self._sent_full,
            anchor_every=median(sorted(b - a for a, b in pairwise(self._anchored))),
            pause_ms=median(self._all_pauses),
            worst_pause_ms=self._all_pauses[-1] if self._all_pauses else None,
            lag_s=median(self._all_lags),
            step_s=median(sorted(b - a for (a, _), (b, _) in pairwise(self._trainer))),
            replicas=tuple(self._shown(name) for name in sorted(self._tracks)),
            syncs=tuple((sync, self._slowest.get(sync.version)) for sync in reversed(self._recent)),
            trainer=tuple(self._trainer),
            deltas=self._deltas.points(),
            anchors=self._anchors.points(),
            changed=self._changed.points(),
            pauses=self._pauses.points() + self._unsettled(),
            saved=self._saved.points(),
            reward=self._reward.points(),
            solved=self._metrics[SOLVED].points(),
            invalid=self._metrics[INVALID].points(),
            staleness=self._metrics[STALENESS].points(),
            canaries=tuple(sorted(self._canaries.values(), key=lambda canary: -canary.difference)),
            group=self._group,
            reward_first=mean(self._first) if self._first else None,
            reward_lately=mean(self._lately) if self._lately else None,
        )

    def _sync(self, event: SyncEvent) -> None:
        self.version, self._done = event.version, None
        self._recent.append(event)
        self._trainer.append((event.t, event.version))
        for track in self._tracks.values():
            track.forget(self._trainer[0][0])
        if event.version == 0 or event.anchor_bytes:
            self._anchored.append(event.version)
            self._anchors.add(event.version, event.anchor_bytes or event.payload_bytes)
        if event.version:
            self._delta(event)

    def _delta(self, event: SyncEvent) -> None:
        self._sent += event.payload_bytes + event.anchor_bytes
        self._sent_full += event.full_bytes
        self._saved.add(event.version, self._sent_full - self._sent)
        self._deltas.add(event.version, event.payload_bytes)
        self._changed.add(event.version, event.changed / max(1, event.total))
        _insert(self._all_sizes, event.payload_bytes)

    def _step(self, event: StepEvent) -> None:
        if event.reward is not None and math.isfinite(event.reward):
            self._reward.add(event.step, event.reward)
            self._lately.append(event.reward)
            if len(self._first) < LATELY:
                self._first.append(event.reward)
        for name, curve in self._metrics.items():
            if name in event.metrics:
                curve.add(event.step, event.metrics[name])
        if event.rollouts:
            self._group = event

    def _track(self, replica: str) -> _Track:
        """The replica's; where there are too many, whoever was not heard of for longest makes room."""
        self._tracks[replica] = track = self._tracks.pop(replica, None) or _Track()
        if len(self._tracks) > REPLICAS:
            del self._tracks[next(iter(self._tracks))]
        return track

    def _replica(self, event: ReplicaEvent) -> None:
        track = self._track(event.replica)
        track.moved_to(event.t, event.version)
        track.state, track.digest, track.error = event.state, event.digest, event.error
        track.signed_by = event.signed_by

    def _commit(self, event: CommitEvent) -> None:
        track = self._track(event.replica)
        track.moved_to(event.t, event.version)
        track.digest = event.digest
        if event.joined:  # starting vLLM takes as long as it takes; the curves are about syncs
            return
        track.lag_s = event.lag_s
        track.lags.add(event.version, event.lag_s)
        _insert(self._all_pauses, event.pause_ms)
        _insert(self._all_lags, event.lag_s)
        self._take_slowest(event)

    def _take_slowest(self, event: CommitEvent) -> None:
        was = self._slowest.get(event.version, Slowest(0, 0, 0, 0, event))
        self._slowest[event.version] = Slowest(
            max(was.fetch_s, event.fetch_s),
            max(was.stage_s, event.stage_s),
            max(was.commit_ms, event.commit_ms),
            max(was.pause_ms, event.pause_ms),
            max(was.last, event, key=lambda commit: commit.lag_s),
        )
        if len(self._slowest) > UNSETTLED:
            oldest = next(iter(self._slowest))
            self._pauses.add(oldest, self._slowest.pop(oldest).pause_ms)

    def _unsettled(self) -> Series:
        return tuple((version, slow.pause_ms) for version, slow in self._slowest.items())

    def _shown(self, name: str) -> Replica:
        track = self._tracks[name]
        return Replica(
            name=name,
            state=track.state,
            version=track.version,
            behind=None if track.version is None else (self.version or 0) - track.version,
            lag_s=track.lag_s,
            digest=track.digest,
            digest_ok=self._matches(track.version, track.digest),
            error=track.error,
            signed_by=track.signed_by,
            versions=since(list(track.versions), self._trainer[0][0]),
            lags=track.lags.points(),
        )

    def _matches(self, version: int | None, digest: str | None) -> bool | None:
        published = None if version is None else self.digests.get(version)
        return None if published is None or digest is None else published == digest


def _insert(ordered: list[float], value: float) -> None:
    """Keep `value` in its place; where there are too many, every second goes, and the largest stays."""
    insort(ordered, value)
    if len(ordered) > MEDIANS:
        del ordered[-2::-2]
