"""The state of a run, updated event by event, and its `Progress`: what a page shows of the run at one moment.

Neither the cost of an event nor the size of a `Progress` grows with the run.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.runlog import (
    CommitEvent,
    DoneEvent,
    Event,
    ReplicaEvent,
    ScoreEvent,
    StepEvent,
    SyncEvent,
    TrafficEvent,
)
from delta_weight_sync.traffic import RunTraffic, TrafficSum

POINTS = 300  # max points of a curve; more points would not be visible on a screen
FRAMES = 60  # moments: earlier versions at which the page can show the run
_MEAN = 20  # steps in the mean of the first rewards, and of the last; in a short run, half of all steps
_UNSETTLED = 64  # versions whose slowest commit is kept, because a replica may commit a version late
_ROWS = 12  # rows of the table of syncs
_WINDOW = 24  # versions in the chart of each replica's version over time (the staircase)
_CHANGES = 256  # changes of a replica's version that are kept for the staircase
_REPLICAS = 128  # replicas shown; of more, the replica that was silent longest is dropped
_MEDIANS = 1 << 16  # a median of at most this many values is exact
# The curves of a run. The points are (version, value) up to "saved", and (step, value) after that.
_CURVES = (
    "deltas",  # bytes
    "anchors",  # bytes
    "changed",  # share of the elements
    "pauses",  # milliseconds of each commit
    "saved",  # bytes saved so far compared to whole checkpoints
    "reward",
    "solved",  # share of the games
    "invalid",  # share of the guesses
    "staleness",  # syncs between a sample's weights and the trainer's
)
_PEAKS = {"anchors", "pauses", "staleness"}  # merged points become their maximum; in other curves, their mean
# Metrics of steps that have a panel of their own: TRL's names, and titles. Then come panels of other metrics,
# but not of the trainer's inner workings.
_TITLES = {
    "loss": "Loss",
    "kl": "KL divergence",
    "ratio": "Importance ratio",
    "entropy": "Entropy",
    "clip_ratio/region_mean": "Tokens clipped",
    "completions/mean_length": "Completion length",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "perf/trained_tok_s_wall_clock": "Tokens per second",
    "eval_loss": "Loss on held-out data",
}
_INNER = (
    *("sample/", "batch/", "perf/", "clip_ratio/", "completions/", "games/", "tools/", "rollout/"),
    *("reward", "epoch", "num_", "train_", "total_"),
)
_PANELS = 12  # panels of metrics; each has at most `_METRIC_POINTS` points
_METRIC_POINTS = 120
_KNOWN_METRICS = 64  # max metrics whose curve is kept, and max scores of `evaluate`
_SCORED = 1024  # versions of a score that are kept; of more, every second one
_METRICS = {
    "games/solve_rate": "solved",
    "games/invalid_rate": "invalid",
    "sample/staleness_mean": "staleness",
}

Point = tuple[float, float]
Series = tuple[Point, ...]
Digests = Callable[[set[int]], dict[int, str]]  # looks up the published digests of versions


@dataclass(frozen=True)
class Replica:
    """One replica. Do not trust the texts in its status: they come from outside."""

    status: ReplicaEvent
    lag_s: float | None = None  # lag of its last commit, in seconds; joins do not count
    versions: Series = ()  # (unix seconds, version) of each change; a `Progress` has only the chart's
    lags: Series = ()  # (version, seconds); only in a `Progress`

    def report(self, status: ReplicaEvent, t: float) -> "Replica":
        if self.versions and status.version == self.status.version:
            return replace(self, status=status)
        change = (t, math.nan if status.version is None else status.version)
        return replace(self, status=status, versions=(*self.versions, change)[-_CHANGES:])


@dataclass(eq=False)
class Progress:
    """Everything a page shows of a run with at least one version. `RunState` fills it in, event by event."""

    version: int = -1  # -1 before the first version
    last_t: float = 0.0  # unix seconds of the last event
    done: DoneEvent | None = None
    full_bytes: int = 0
    traffic: RunTraffic = field(default_factory=RunTraffic)
    versions: int = 0  # versions after version 0
    sent_full_bytes: int = 0  # what the same syncs would have sent as whole checkpoints
    group: StepEvent | None = None  # the newest step whose rollouts were recorded
    # The next fields are computed when a page needs them.
    digests: Mapping[int, str | None] = field(default_factory=dict)  # published digests of reported versions
    payload_bytes: float | None = None  # median of the deltas
    anchor_every: float | None = None  # median distance between the last anchors, in versions
    pause_ms: float | None = None  # median
    worst_pause_ms: float | None = None
    lag_s: float | None = None  # median
    step_s: float | None = None  # median time between two versions
    replicas: tuple[Replica, ...] = ()
    syncs: tuple[tuple[SyncEvent, CommitEvent | None], ...] = ()  # newest first, each with its slowest commit
    trainer: Series = ()  # (unix seconds, version), in the chart of versions over time
    curves: dict[str, Series] = field(default_factory=dict)  # by the names in `_CURVES`
    metrics: dict[str, Series] = field(default_factory=dict)  # (step, value), by the panel's title
    scores: dict[str, Series] = field(default_factory=dict)  # (version, value), by the panel's title
    reward_steps: int = 0  # how many steps each of the next two means covers
    reward_first: float | None = None  # mean of the first steps
    reward_lately: float | None = None  # mean of the last steps

    @property
    def sync_bytes(self) -> float | None:
        """Mean bytes that a sync takes altogether, without trainer states; None before the first delta."""
        return self.traffic.sync_bytes / self.versions if self.versions and self.traffic.sent else None

    def behind(self, replica: ReplicaEvent) -> int | None:
        """Return how many versions a replica is behind; None if it serves no version."""
        return None if replica.version is None else self.version - replica.version

    def matches(self, report: ReplicaEvent | DoneEvent) -> bool | None:
        """Compare a digest with the published one; None if one of the two is not known."""
        digest = None if report.version is None else self.digests.get(report.version)
        return None if digest is None or report.digest is None else digest == report.digest

    def quantized_otherwise(self, report: ReplicaEvent) -> str | None:
        """Name a replica that serves the same version with the same quantization, but with other bytes."""
        if report.quantized is None:
            return None
        for other in (replica.status for replica in self.replicas):
            made = other.quantized
            alike = made and (other.version, made.scheme) == (report.version, report.quantized.scheme)
            if made and alike and made.digest != report.quantized.digest:
                return other.replica
        return None


class Start(NamedTuple):
    """How far a run has come before its first step. Times are unix seconds; None: not yet."""

    published_t: float | None  # version 0
    served_t: float | None
    played_t: float | None  # the first games
    replicas: tuple[ReplicaEvent, ...]  # do not trust their texts
    taken: float | None  # samples that the trainer has taken


class Curve:
    """A curve of at most `most` points, and the newest point, however many points are added.

    When the curve is full, neighbouring points are merged in pairs: a drawn point is then the mean of several
    added points. With `peaks`, the y of a drawn point is their maximum, so that spikes stay visible.
    """

    def __init__(self, *, peaks: bool = False, most: int = POINTS) -> None:
        self._peaks = peaks
        self._most = most
        self._each = 1  # number of added points that are merged into one drawn point
        self._groups: list[tuple[int, float, float]] = []  # number of points, sum of x, sum or maximum of y
        self._newest: Point = (0.0, 0.0)

    def back_to(self, x: float) -> bool:
        """Drop the points at or above `x` if the newest is above it. Return whether it is."""
        back = x < self._newest[0]
        if back:
            self._groups = [group for group in self._groups if group[1] / group[0] < x]
            self._each = self._each if self._groups else 1
        return back

    def add(self, x: float, y: float) -> None:
        """Add a point to the right of all others."""
        self._newest = x, y
        if self._groups and self._groups[-1][0] < self._each:
            self._groups[-1] = self._merged(self._groups[-1], (1, x, y))
            return
        if len(self._groups) == self._most:
            self._groups = [*map(self._merged, self._groups[::2], self._groups[1::2])]
            self._each *= 2
        self._groups.append((1, x, y))

    def _merged(self, a: tuple[int, float, float], b: tuple[int, float, float]) -> tuple[int, float, float]:
        return a[0] + b[0], a[1] + b[1], max(a[2], b[2]) if self._peaks else a[2] + b[2]

    def points(self) -> Series:
        curve = tuple((x / count, y if self._peaks else y / count) for count, x, y in self._groups)
        return (*curve, self._newest) if curve and curve[-1][0] != self._newest[0] else curve


class RunState:
    """A run so far, and its progress at earlier versions."""

    def __init__(self) -> None:
        self.digests: dict[int, str | None] = {}  # published digests; the reader of the bucket fills them in
        self.events = 0  # number of events added so far
        self.seen = Progress()
        self._recent: deque[SyncEvent] = deque(maxlen=_ROWS)
        self._trainer: deque[Point] = deque(maxlen=_WINDOW)
        self._anchored: deque[int] = deque(maxlen=_ROWS)
        self._curves = {name: Curve(peaks=name in _PEAKS) for name in _CURVES}
        self._metrics: dict[str, Curve] = {}
        # By title: version -> score. In no order, because each start of `evaluate` has a log of its own under
        # a random name, and a smaller --every scores versions between the others.
        self._scores: dict[str, dict[int, float]] = {}
        self._first: list[Point] = []  # the first rewards, with their steps
        self._lately: deque[Point] = deque(maxlen=2 * _MEAN)  # the newest rewards, with their steps
        self._played: float | None = None  # when the first games were played
        self._slowest: dict[int, CommitEvent] = {}  # by version: the commit with the largest lag
        self._replicas: dict[str, Replica] = {}  # by name, silent longest first
        self._lags: dict[str, Curve] = {}
        self._sizes, self._all_pauses, self._all_lags = (list[float]() for _ in range(3))  # sorted
        self._frames: dict[int, Progress] = {}
        self._traffic = TrafficSum()

    def add(self, events: Iterable[Event]) -> None:
        """Add events, oldest first."""
        for event in events:
            if isinstance(event, SyncEvent) and self._recent:
                self._keep_frame(self.seen.version, event.version)
            self.events += 1
            self.seen.last_t = max(self.seen.last_t, event.t)
            match event:
                case SyncEvent():
                    self._sync(event)
                case TrafficEvent():
                    self._add_traffic(event)
                case StepEvent():
                    self._step(event)
                case ReplicaEvent(state="removed"):
                    for known in (self._replicas, self._lags):
                        known.pop(event.replica, None)
                case ReplicaEvent():
                    self._replicas[event.replica] = self._replica(event).report(event, event.t)
                case CommitEvent():
                    self._commit(event)
                case ScoreEvent():
                    self._score(event)
                case DoneEvent():
                    self.seen.done = event

    def served(self, own: Sequence[ReplicaEvent] = ()) -> set[int]:
        """Return the versions whose published digests are needed; `own` is as for `progress`."""
        reports = [*own, self.seen.done, *(replica.status for replica in self._replicas.values())]
        return {report.version for report in reports if report and report.version is not None}

    def progress(self, own: Sequence[ReplicaEvent] = ()) -> Progress | None:
        """Return what the page shows, None before the first version. `own` has the states of the replicas
        that the page asks itself: they replace those in the log."""
        if not self._recent:
            return None
        replicas = dict(self._replicas)
        for status in own:
            known = replicas.get(status.replica, Replica(status))
            replicas[status.replica] = known.report(status, self.seen.last_t)
        steps = max(1, len(self._lately) // 2)
        return replace(
            self.seen,
            digests=dict(self.digests),
            payload_bytes=_median(self._sizes),
            anchor_every=_median([b - a for a, b in pairwise(self._anchored)]),
            pause_ms=_median(self._all_pauses),
            worst_pause_ms=self._all_pauses[-1] if self._all_pauses else None,
            lag_s=_median(self._all_lags),
            step_s=_median([b - a for (a, _), (b, _) in pairwise(self._trainer)]),
            replicas=tuple(self._shown(replicas[name]) for name in sorted(replicas)),
            syncs=tuple((sync, self._slowest.get(sync.version)) for sync in reversed(self._recent)),
            trainer=tuple(self._trainer),
            curves={name: curve.points() for name, curve in self._curves.items()},
            metrics=self._panels(),
            scores={title: self._scored(self._scores[title]) for title in [*self._scores][:_PANELS]},
            reward_steps=steps,
            reward_first=fmean(reward for _, reward in self._first[:steps]) if self._first else None,
            reward_lately=fmean(reward for _, reward in [*self._lately][-steps:]) if self._lately else None,
        )

    def start(self, own: Sequence[ReplicaEvent] = ()) -> Start | None:
        """Return how far a run that starts has come; None after its first step."""
        if self.seen.version > 0 or self._lately:
            return None
        known = {name: replica.status for name, replica in self._replicas.items()}
        known |= {status.replica: status for status in own}
        changes = (change for replica in self._replicas.values() for change in replica.versions)
        served = [t for t, version in changes if not math.isnan(version)] or [self.seen.last_t]
        serving = any(status.version is not None for status in known.values())
        return Start(
            published_t=self._trainer[0][0] if self._trainer else None,
            served_t=min(served) if serving else None,
            played_t=self._played,
            replicas=tuple(known.values()),
            taken=self.seen.group.metrics.get("sample/taken", 0.0) if self.seen.group else None,
        )

    def at(self, version: int, digests: Digests) -> Progress:
        """Return the run at one of its `moments`, except the newest. Raises `ProtocolError` for others."""
        frame = self._frames.get(version)
        if frame is None:
            raise ProtocolError(f"this page keeps only some earlier versions, not version {version}")
        reported = {r.status.version for r in frame.replicas if r.status.version is not None}
        if unknown := {one for one in reported if frame.digests.get(one) is None}:
            frame = replace(frame, digests={**frame.digests, **digests(unknown)})
            self._frames[version] = frame
        return frame

    def _keep_frame(self, version: int, newest: int) -> None:
        """Keep the current progress for each moment from `version` up to, but not including, `newest`."""
        step = _stride(newest)
        if passed := range(-(-version // step) * step, newest, step):
            progress = self.progress()
            assert progress is not None
            self._frames |= dict.fromkeys(passed, progress)
        if len(self._frames) > FRAMES:
            self._frames = {at: frame for at, frame in self._frames.items() if at % step == 0}

    def _sync(self, event: SyncEvent) -> None:
        seen = self.seen
        seen.version = event.version
        seen.full_bytes = event.full_bytes
        seen.done = None
        self._recent.append(event)
        self._trainer.append((event.t, event.version))
        if event.version == 0 or event.anchor_bytes:
            self._anchored.append(event.version)
            self._curves["anchors"].add(event.version, event.anchor_bytes or event.payload_bytes)
        if event.version:
            seen.versions += 1
            seen.sent_full_bytes += event.full_bytes
            if not event.whole:
                self._curves["deltas"].add(event.version, event.payload_bytes)
                self._curves["changed"].add(event.version, event.changed / max(1, event.total))
                _insert(self._sizes, event.payload_bytes)

    def _add_traffic(self, event: TrafficEvent) -> None:
        self._traffic.add(event)
        self.seen.traffic = self._traffic.total()
        if event.trainer and event.version:
            saved = self.seen.sent_full_bytes - self.seen.traffic.sent_bytes
            self._curves["saved"].add(event.version, max(0, saved))

    def _step(self, event: StepEvent) -> None:
        if event.reward is not None and math.isfinite(event.reward):
            if self._add_step(self._curves["reward"], event.step, event.reward):
                self._first = [point for point in self._first if point[0] < event.step]
                earlier = [point for point in self._lately if point[0] < event.step]
                self._lately = deque(earlier, self._lately.maxlen)
            self._lately.append((event.step, event.reward))
            if len(self._first) < _MEAN:
                self._first.append((event.step, event.reward))
        for metric in _METRICS.keys() & event.metrics.keys():
            self._add_step(self._curves[_METRICS[metric]], event.step, event.metrics[metric])
        for metric, value in event.metrics.items():
            if metric in _TITLES or not metric.startswith(_INNER):
                self._add_metric(metric, event.step, value)
        if event.rollouts:
            self.seen.group = event
            if not event.step and self._played is None:
                self._played = event.t

    def _add_step(self, curve: Curve, step: int, value: float) -> bool:
        """Add a point. A trainer that resumes or starts again takes its last steps, or all, once more: they
        replace the earlier ones. Return whether it did."""
        back = curve.back_to(step)
        curve.add(step, value)
        return back

    def _score(self, event: ScoreEvent) -> None:
        for name, value in event.scores.items():
            title = f"{event.name}: {name}"
            if title not in self._scores and len(self._scores) == _KNOWN_METRICS:
                continue
            values = self._scores.setdefault(title, {})
            values[event.version] = value
            if len(values) > _SCORED:
                for version in sorted(values)[-2::-2]:
                    del values[version]

    def _scored(self, values: Mapping[int, float]) -> Series:
        """The curve of a score up to the newest version of now."""
        curve = Curve(most=_METRIC_POINTS)
        for version in sorted(values):
            if version <= self.seen.version:
                curve.add(version, values[version])
        return curve.points()

    def _add_metric(self, metric: str, step: int, value: float) -> None:
        if metric not in self._metrics and len(self._metrics) < _KNOWN_METRICS:
            self._metrics[metric] = Curve(most=_METRIC_POINTS)
        if metric in self._metrics and math.isfinite(value):
            self._add_step(self._metrics[metric], step, value)

    def _panels(self) -> dict[str, Series]:
        """Return the curves of the metrics that have a panel, by title, in the order of `_TITLES`."""
        others = (metric for metric in self._metrics if metric not in _TITLES)
        names = [*(metric for metric in _TITLES if metric in self._metrics), *others][:_PANELS]
        return {_TITLES.get(name, name): self._metrics[name].points() for name in names}

    def _replica(self, event: ReplicaEvent | CommitEvent) -> Replica:
        """Return what is known of an event's replica, and note that this replica was heard last."""
        name = event.replica
        first = ReplicaEvent(t=event.t, replica=name, state="serving", version=None, digest=None)
        self._replicas[name] = replica = self._replicas.pop(name, None) or Replica(first)
        if len(self._replicas) > _REPLICAS:
            gone = next(iter(self._replicas))
            del self._replicas[gone]
            self._lags.pop(gone, None)
        return replica

    def _commit(self, event: CommitEvent) -> None:
        replica = self._replica(event)
        # Its next status says how these weights are quantized.
        committed = {"version": event.version, "digest": event.digest, "quantized": None}
        replica = replica.report(replica.status.model_copy(update=committed), event.t)
        self._replicas[event.replica] = replica
        if event.joined:  # the times of a join include the start of vLLM
            return
        self._replicas[event.replica] = replace(replica, lag_s=event.lag_s)
        self._lags.setdefault(event.replica, Curve(peaks=True)).add(event.version, event.lag_s)
        _insert(self._all_pauses, event.pause_ms)
        _insert(self._all_lags, event.lag_s)
        self._curves["pauses"].add(event.version, event.pause_ms)
        slowest = self._slowest.get(event.version, event)
        self._slowest[event.version] = max(slowest, event, key=lambda commit: commit.lag_s)
        if len(self._slowest) > _UNSETTLED:
            del self._slowest[next(iter(self._slowest))]

    def _shown(self, replica: Replica) -> Replica:
        """Return a replica with its curves. Its staircase begins where the trainer's staircase begins."""
        start = self._trainer[0][0]
        lags = self._lags.get(replica.status.replica)
        later = (at for at, (t, _) in enumerate(replica.versions[1:]) if t > start)
        first = next(later, len(replica.versions) - 1)  # the last change up to `start`, or the oldest change
        versions = tuple((max(start, t), version) for t, version in replica.versions[first:])
        return replace(replica, versions=versions, lags=lags.points() if lags else ())


def moments(newest: int) -> list[int]:
    """Return the versions at which the page can show a run: evenly spaced, and the newest."""
    return sorted({*range(0, newest + 1, _stride(newest)), newest})


def _stride(newest: int) -> int:
    """The distance of two moments, in versions: a power of two. When the distance doubles, every second
    moment is dropped. So no version has to become a moment later, when its progress is no longer known."""
    return 1 << math.ceil(math.log2(max(1, newest / (FRAMES - 1))))


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _insert(ordered: list[float], value: float) -> None:
    """Insert `value` in order. If there are too many values, drop every second, but not the largest."""
    insort(ordered, value)
    if len(ordered) > _MEDIANS:
        del ordered[-2::-2]
