"""Events in, `Progress` out: one event at a time, at the same cost however long the run is."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from inference_space.dashboard.series import Point, mean_y, middle, since, thin
from inference_space.dashboard.view import Progress, Replica, Slowest
from shared.runlog import CommitEvent, DoneEvent, Event, ReplicaEvent, StepEvent, SyncEvent

ROWS = 12  # of the table of syncs
LATELY = 20  # steps
WINDOW = 24  # versions in the staircase
SOLVED, INVALID, STALENESS = "games/solve_rate", "games/invalid_rate", "sample/staleness_mean"


@dataclass
class _Track:
    state: str = "serving"
    version: int | None = None
    digest: str | None = None
    error: str | None = None
    versions: list[Point] = field(default_factory=list)
    lags: list[Point] = field(default_factory=list)

    def moved_to(self, t: float, version: int | None) -> None:
        if not self.versions or version != self.version:
            self.versions.append((t, math.nan if version is None else version))
        self.version = version


class Fold:
    """What is known of a run so far."""

    def __init__(self) -> None:
        self.digests: dict[int, str | None] = {}  # as published, where known; filled in by the reader
        self.version: int | None = None
        self._last_t = 0.0
        self._done: DoneEvent | None = None
        self._recent: deque[SyncEvent] = deque(maxlen=ROWS)
        self._sent = self._sent_full = 0
        self._trainer: list[Point] = []
        self._deltas: list[Point] = []
        self._anchors: list[Point] = []
        self._changed: list[Point] = []
        self._saved: list[Point] = []
        self._reward: list[Point] = []
        self._metrics: dict[str, list[Point]] = {SOLVED: [], INVALID: [], STALENESS: []}
        self._group: StepEvent | None = None
        self._slowest: dict[int, Slowest] = {}
        self._tracks: dict[str, _Track] = {}
        self._sizes, self._pauses, self._lags = list[float](), list[float](), list[float]()  # sorted

    def add(self, events: Iterable[Event]) -> None:
        """Fold events, oldest first."""
        for event in events:
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
        start = self._trainer[max(0, len(self._trainer) - WINDOW)][0]
        return Progress(
            version=self.version,
            last_t=self._last_t,
            done=self._done,
            done_ok=self._matches(self._done.version, self._done.digest) if self._done else None,
            full_bytes=self._recent[-1].full_bytes,
            payload_bytes=middle(self._sizes),
            sent_bytes=self._sent,
            sent_full_bytes=self._sent_full,
            pause_ms=middle(self._pauses),
            worst_pause_ms=self._pauses[-1] if self._pauses else None,
            lag_s=middle(self._lags),
            step_s=middle(sorted(b - a for (a, _), (b, _) in pairwise(self._trainer[-WINDOW:]))),
            replicas=tuple(self._shown(name, start) for name in sorted(self._tracks)),
            syncs=tuple((sync, self._slowest.get(sync.version)) for sync in reversed(self._recent)),
            trainer=since(self._trainer, start),
            deltas=thin(self._deltas),
            anchors=thin(self._anchors, max),
            changed=thin(self._changed),
            pauses=thin([(version, slow.pause_ms) for version, slow in self._slowest.items()], max),
            saved=thin(self._saved),
            reward=thin(self._reward),
            solved=thin(self._metrics[SOLVED]),
            invalid=thin(self._metrics[INVALID]),
            staleness=thin(self._metrics[STALENESS], max),
            group=self._group,
            reward_first=mean_y(self._reward[:LATELY]),
            reward_lately=mean_y(self._reward[-LATELY:]),
        )

    def _sync(self, event: SyncEvent) -> None:
        self.version, self._done = event.version, None
        self._recent.append(event)
        self._trainer.append((event.t, event.version))
        if event.version == 0:
            self._anchors.append((0, event.payload_bytes))
            return
        self._sent += event.payload_bytes + event.anchor_bytes
        self._sent_full += event.full_bytes
        self._saved.append((event.version, self._sent_full - self._sent))
        self._deltas.append((event.version, event.payload_bytes))
        self._changed.append((event.version, event.changed / max(1, event.total)))
        insort(self._sizes, event.payload_bytes)
        if event.anchor_bytes:
            self._anchors.append((event.version, event.anchor_bytes))

    def _step(self, event: StepEvent) -> None:
        if event.reward is not None and math.isfinite(event.reward):
            self._reward.append((event.step, event.reward))
        for name, points in self._metrics.items():
            if name in event.metrics:
                points.append((event.step, event.metrics[name]))
        if event.rollouts:
            self._group = event

    def _replica(self, event: ReplicaEvent) -> None:
        track = self._tracks.setdefault(event.replica, _Track())
        track.moved_to(event.t, event.version)
        track.state, track.digest, track.error = event.state, event.digest, event.error

    def _commit(self, event: CommitEvent) -> None:
        track = self._tracks.setdefault(event.replica, _Track())
        track.moved_to(event.t, event.version)
        track.digest = event.digest
        if event.joined:  # starting vLLM takes as long as it takes; the curves are about syncs
            return
        track.lags.append((event.version, event.lag_s))
        insort(self._pauses, event.pause_ms)
        insort(self._lags, event.lag_s)
        was = self._slowest.get(event.version, Slowest(0, 0, 0, 0, event))
        self._slowest[event.version] = Slowest(
            max(was.fetch_s, event.fetch_s),
            max(was.stage_s, event.stage_s),
            max(was.commit_ms, event.commit_ms),
            max(was.pause_ms, event.pause_ms),
            max(was.last, event, key=lambda commit: commit.lag_s),
        )

    def _shown(self, name: str, start: float) -> Replica:
        track = self._tracks[name]
        return Replica(
            name=name,
            state=track.state,
            version=track.version,
            behind=None if track.version is None else (self.version or 0) - track.version,
            lag_s=track.lags[-1][1] if track.lags else None,
            digest=track.digest,
            digest_ok=self._matches(track.version, track.digest),
            error=track.error,
            versions=since(track.versions, start),
            lags=thin(track.lags, max),
        )

    def _matches(self, version: int | None, digest: str | None) -> bool | None:
        published = None if version is None else self.digests.get(version)
        return None if published is None or digest is None else published == digest
