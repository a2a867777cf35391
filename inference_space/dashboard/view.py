"""A run as its viewers see it: events folded one at a time, then cut down to what fits on a page."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shared.runlog import CommitEvent, DoneEvent, Event, ReplicaEvent, StepEvent, SyncEvent

POINTS = 300  # of a curve: more than a screen shows
ROWS = 12  # of the table of syncs
LATELY = 20  # steps
WINDOW = 24  # versions in the staircase

Point = tuple[float, float]
Series = tuple[Point, ...]


@dataclass(frozen=True)
class Replica:
    """What is known of one replica; names and errors come from outside and are not to be trusted."""

    name: str
    state: str
    version: int | None
    behind: int | None  # versions
    lag_s: float | None  # hand-over to commit, of its last commit
    digest: str | None
    digest_ok: bool | None  # None: not known yet which digest the trainer published
    error: str | None
    versions: Series  # (unix seconds, version), the window of the staircase
    lags: Series  # (version, seconds)


@dataclass(frozen=True)
class Slowest:
    """What a version cost the replica that it cost most."""

    fetch_s: float
    stage_s: float
    commit_ms: float
    pause_ms: float


@dataclass(frozen=True)
class Progress:
    """Everything a page shows of a run with at least one version."""

    version: int
    last_t: float
    done: DoneEvent | None
    done_ok: bool | None
    full_bytes: int
    payload_bytes: float | None  # median delta
    sent_bytes: int  # deltas and anchors after version 0
    sent_full_bytes: int  # what whole checkpoints would have been
    pause_ms: float | None  # median
    worst_pause_ms: float | None
    lag_s: float | None  # median
    replicas: tuple[Replica, ...]
    syncs: tuple[tuple[SyncEvent, Slowest | None], ...]  # newest first
    trainer: Series  # (unix seconds, version), the window of the staircase
    deltas: Series  # (version, bytes)
    anchors: Series  # (version, bytes)
    changed: Series  # (version, share of the elements)
    pauses: Series  # (version, milliseconds), the slowest replica's
    reward: Series  # (step, reward)
    reward_first: float | None  # mean of the first `LATELY` steps
    reward_lately: float | None  # and of the last


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
    """Takes events in, gives `Progress` out. Adding one costs the same however long the run is."""

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
        self._reward: list[Point] = []
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
                case StepEvent(reward=float(reward)) if math.isfinite(reward):
                    self._reward.append((event.step, reward))
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
        since = self._trainer[max(0, len(self._trainer) - WINDOW)][0]
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
            replicas=tuple(self._shown(name, since) for name in sorted(self._tracks)),
            syncs=tuple((sync, self._slowest.get(sync.version)) for sync in reversed(self._recent)),
            trainer=_since(self._trainer, since),
            deltas=thin(self._deltas),
            anchors=thin(self._anchors, max),
            changed=thin(self._changed),
            pauses=thin([(version, slow.pause_ms) for version, slow in self._slowest.items()], max),
            reward=thin(self._reward),
            reward_first=_mean_y(self._reward[:LATELY]),
            reward_lately=_mean_y(self._reward[-LATELY:]),
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
        self._deltas.append((event.version, event.payload_bytes))
        self._changed.append((event.version, event.changed / max(1, event.total)))
        insort(self._sizes, event.payload_bytes)
        if event.anchor_bytes:
            self._anchors.append((event.version, event.anchor_bytes))

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
        was = self._slowest.get(event.version, Slowest(0, 0, 0, 0))
        self._slowest[event.version] = Slowest(
            max(was.fetch_s, event.fetch_s),
            max(was.stage_s, event.stage_s),
            max(was.commit_ms, event.commit_ms),
            max(was.pause_ms, event.pause_ms),
        )

    def _shown(self, name: str, since: float) -> Replica:
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
            versions=_since(track.versions, since),
            lags=thin(track.lags, max),
        )

    def _matches(self, version: int | None, digest: str | None) -> bool | None:
        published = None if version is None else self.digests.get(version)
        return None if published is None or digest is None else published == digest


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return sum(values) / len(values)


def _mean_y(points: Sequence[Point]) -> float | None:
    return mean([y for _, y in points]) if points else None


def middle(ordered: Sequence[float]) -> float | None:
    """Median of sorted values; None of none."""
    half = len(ordered) // 2
    return mean(ordered[half - 1 + len(ordered) % 2 : half + 1]) if ordered else None


def thin(points: Sequence[Point], pick: Callable[[list[float]], float] = mean) -> Series:
    """At most `POINTS` points: neighbours become one, its y by `pick`, so `max` keeps every spike."""
    group = math.ceil(len(points) / POINTS)
    if group <= 1:
        return tuple(points)
    groups = (points[start : start + group] for start in range(0, len(points), group))
    return tuple((mean([x for x, _ in some]), pick([y for _, y in some])) for some in groups)


def _since(points: Sequence[Point], t: float) -> Series:
    """The end of a staircase: what lies after `t`, and the step it starts on."""
    first = len(points)
    while first > 0 and (first == len(points) or points[first][0] > t):
        first -= 1
    return tuple((max(t, x), y) for x, y in points[first:])
