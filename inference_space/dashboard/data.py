"""Reads the bucket for the dashboard, once for all viewers: the live page, and what viewers open in it.

`RunCache` follows the run in one thread. `Library` answers from caches. `RateLimitedBucket` limits what
visitors make the dashboard read, because replicas and the trainer need the owner's quota.
"""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Generic, TypeVar

from delta_weight_sync import errors
from delta_weight_sync.reader import RunReader, manifests_of, no_longer_held
from delta_weight_sync.records import Keys, Manifest, RunInfo, parse
from delta_weight_sync.runlog import CommitEvent, ReplicaEvent, ReplicaReport, RunLogReader
from delta_weight_sync.runlog import Event as LogEvent
from delta_weight_sync.scratch import Scratch
from delta_weight_sync.store import SMALL, Bucket, Listing, ObjectInfo
from delta_weight_sync.util import Guard, size_text, time_text
from inference_space.dashboard.remote import RemoteReplica
from inference_space.dashboard.state import Progress, RunState, Start
from inference_space.dashboard.views import OpenedDelta, can_download, open_delta

EVERY_S = 1.0  # seconds between two readings while there are viewers
IDLE_S = 60.0  # seconds between two readings without viewers
LIST_EVERY_S = 5.0  # seconds for which a listing is reused; each 1,000 objects in it add this time again
FAILED_S = 300.0  # seconds until a damaged object is read again: it may have been repaired
MAX_REBUILD = 1_000_000_000  # max bytes of files from which a dashboard rebuilds a version for a proof
MAX_DOWNLOAD = 256_000_000  # max bytes of an object that a visitor may download through the dashboard
# Seconds. In the Hub's windows of 300 s, visitors make at most 360 calls. The Hub allows a free user 1,000
# requests to its API and 5,000 for files.
WINDOW_S = 600.0
CALLS = 240  # of the bucket, of up to 3 requests each, that visitors gain in a window and can save up
BYTES = 2_000_000_000  # the same for bytes; enough for the largest version that a dashboard rebuilds
_SHOW_EVERY = 512  # events of a long log after which the page says how many were read
_OWN_COMMITS = 1024
_PAGE = 1000  # objects that one request lists
_DIGEST_TRIES = 10  # after this many lookups of the same missing digests, wait for a newer version
_DIGESTS_BACK = 64  # a lookup reads at most this many manifests, from the newest version back
# answers kept in memory
_MANIFESTS = 256
_PROOFS = 4096
_TENSORS = 200_000  # max tensors in all opened deltas in memory together; each takes about 300 bytes
_DISK = 1_000_000_000  # bytes of objects kept for further downloads

Pause = Callable[[Event, float], object]  # waits until the event is set, for at most these seconds
Report = Callable[
    [int], ReplicaReport
]  # a replica's report, with its commits of versions after the given one
Clock = Callable[[], float]


@dataclass(frozen=True, eq=False)
class RunView:
    """What every viewer sees until the next refresh. Each changed view has a new `revision`."""

    bucket: str
    run: str | None
    revision: int = 0
    model: str | None = None
    read: bool = False  # the bucket was read at least once
    events_read: int = 0  # during the first reading of the log: the events read so far
    problem: str | None = None  # why the bucket could not be read just now
    skipped: int = 0  # lines of the log that are not events
    quiet_min: int = 0  # whole minutes without an event
    progress: Progress | None = None  # None before the first version
    start: Start | None = None  # what happens before the first step
    other: tuple[str, Progress] | None = None  # name and progress of the run to compare, if it has a version
    waited: str = ""  # time since the newest of the times in `start`, or since the dashboard started


class _Asked:
    """A replica that the dashboard asks itself."""

    def __init__(self, ask: Report) -> None:
        self._ask = ask
        self.url = ask.url if isinstance(ask, RemoteReplica) else "this replica"
        # Its newest commits: version and time in milliseconds. They come from its report and, later, from the
        # log, if the trainer asks this replica, too.
        self.commits: deque[tuple[int, int]] = deque(maxlen=_OWN_COMMITS)

    def report(self) -> ReplicaReport:
        """Its report, with the commits that came after the last report."""
        return self._ask(max((version for version, _ in self.commits), default=-1))

    def is_new(self, commit: LogEvent) -> bool:
        """Whether a commit of this replica was not added yet. Notes it."""
        assert isinstance(commit, CommitEvent)
        known = commit.version, math.floor(1000 * commit.t)
        if known in self.commits:
            return False
        self.commits.append(known)
        return True


class RunCache:
    """Keeps the newest view of a run: refreshed every second with viewers, and every minute without.

    If `run` is None, the cache takes the newest run that it finds, and keeps that run until run.json is gone.
    What some replicas are doing comes from `reports`, without the way through the trainer, the log and the
    bucket, which takes up to ten seconds on the Hub. Not every trainer logs its replicas. `compare` names
    another run, whose progress each view has as well.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: str | None,
        *,
        reports: Sequence[Report] = (),
        compare: str = "",
        pause: Pause = Event.wait,
    ) -> None:
        self._bucket = bucket
        self._run = run
        self._reports = [_Asked(report) for report in reports]
        self._compared = RunCache(bucket, compare, pause=pause) if compare else None
        self._pause = pause
        self._view = RunView(bucket=bucket.url, run=run)
        self._info: RunInfo | None = None
        self._infos = AnswerCache[ObjectInfo, RunInfo | None](lambda info: read_info(bucket, info.key), 1)
        self._log: RunLogReader | None = None
        self.state = RunState()
        self._opened = time.time()
        self._shown: object = None  # what the shown progress was computed from
        self._lookups: tuple[object, int] = (None, 0)  # which digests were looked up last, and how often
        self._asked = Event()
        self._guard = Guard("a refresh of the dashboard")
        Thread(target=self._loop, name="dashboard-reader", daemon=True).start()

    def view(self) -> RunView:
        """Return the newest view, and keep it fresh."""
        self._asked.set()
        return self._view

    def _loop(self) -> None:
        while True:
            self._asked.clear()
            with self._guard:
                self._refresh()
            self._pause(Event(), EVERY_S)  # nothing sets this event, so the pause takes `EVERY_S`
            if not self._asked.is_set():
                self._pause(self._asked, IDLE_S)

    def _refresh(self) -> None:
        own: Sequence[ReplicaEvent] = ()
        problem = None
        try:
            with ThreadPoolExecutor(max(1, len(self._reports)), "replica-status") as pool:
                reports = self._told_apart(pool.map(_Asked.report, self._reports))
            # Remove the status's time, because it would make every refresh look like a change.
            own = [report.status.model_copy(update={"t": 0.0}) for report in reports]
            self._read(own)
            if self._log:
                for asked, report in zip(self._reports, reports, strict=True):
                    self.state.add(commit for commit in report.commits if asked.is_new(commit))
        except errors.DeltaWeightSyncError as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - viewers must see the reason
            problem = f"The bucket could not be read: {type(error).__name__}: {error}"
        was = self._view
        info = self._info
        progress = self._view.progress
        basis = (self.state, self.state.events, dict(self.state.digests), own)
        if basis != self._shown:
            self._shown, progress = basis, self.state.progress(own)
        ended = progress is not None and progress.done
        start = None if ended else self.state.start(own)
        reached = (start.published_t, start.served_t, start.played_t) if start else ()
        since = max((t for t in reached if t), default=self._opened)
        other = self._compared.view() if self._compared else None
        now = replace(
            was,
            other=(other.run or "", other.progress) if other and other.progress else None,
            run=info.run if info else self._run,
            model=info.model if info else None,
            read=was.read or problem is None,
            events_read=0,
            skipped=self._log.skipped if self._log else 0,
            problem=problem,
            quiet_min=0 if ended or progress is None else max(0, int((time.time() - progress.last_t) / 60)),
            progress=progress,
            start=start,
            waited=time_text(max(1, int(time.time() - since))) if start else "",
        )
        if vars(now) != vars(was):
            self._view = replace(now, revision=was.revision + 1)

    def _told_apart(self, reports: Iterable[ReplicaReport]) -> list[ReplicaReport]:
        """The reports, each under a name of its own: by default, all replicas of a machine have its name."""
        names = set[str]()
        told: list[ReplicaReport] = []
        for asked, report in zip(self._reports, reports, strict=True):
            told.append(report.renamed(asked.url) if report.status.replica in names else report)
            names.add(report.status.replica)
        return told

    def _read(self, own: Sequence[ReplicaEvent]) -> None:
        info = self._find()
        if info != self._info:
            self._info = info
            self.state = RunState()
            for asked in self._reports:
                asked.commits.clear()
            every_s = 3 * self._bucket.report_every_s
            self._log = RunLogReader(self._bucket, info.run, list_every_s=every_s) if info else None
        if info is None or self._log is None:
            return
        by_name = {status.replica: asked for status, asked in zip(own, self._reports, strict=True)}
        for event in self._log.poll():  # one by one: events that came before a failure are shown
            known = by_name.get(event.replica) if isinstance(event, CommitEvent) else None
            if known is None or known.is_new(event):
                self.state.add([event])
            if not self._view.read and self.state.events % _SHOW_EVERY == 0:
                view = self._view
                read = self.state.events
                self._view = replace(view, run=info.run, events_read=read, revision=view.revision + 1)
        self._learn_digests(RunReader(self._bucket, info.run), own)

    def _find(self) -> RunInfo | None:
        """Return the description of the run to show; read it again only if its object changed."""
        name = self._run or (self._info.run if self._info else None)
        found = self._bucket.stat(Keys(name).info) if name else None
        known = self._infos(found) if found else None
        return known if known or self._run else newest_run(self._bucket)

    def _learn_digests(self, run: RunReader, own: Sequence[ReplicaEvent]) -> None:
        """Look up the published digests of the versions that replicas serve."""
        known = self.state.digests
        served = self.state.served(own)
        self.state.digests = digests = {version: known[version] for version in served & known.keys()}
        wanted = served - digests.keys()
        asked = (wanted, self.state.seen.version)
        self._lookups = asked, self._lookups[1] + 1 if asked == self._lookups[0] else 1
        if not wanted or self._lookups[1] > _DIGEST_TRIES:  # a replica may name a version that never existed
            return
        for manifest in islice(run.versions(), _DIGESTS_BACK):
            if manifest.version in wanted:
                digests[manifest.version] = manifest.digest
            if manifest.version <= min(wanted):
                return
        digests.update((version, None) for version in wanted - digests.keys())  # too far back: give up


def newest_run(bucket: Bucket) -> RunInfo | None:
    """Return the description of the run created last. Damaged descriptions are skipped."""
    found: list[RunInfo] = []
    for key in [info.key for info in bucket.list("runs/") if info.key.endswith("/run.json")]:
        with suppress(errors.ProtocolError):
            if info := read_info(bucket, key):
                found.append(info)
    return max(found, key=lambda info: info.created_at, default=None)


def read_info(bucket: Bucket, key: str) -> RunInfo | None:
    """Read a run's description. Returns None if it is missing; raises `ProtocolError` if it is damaged."""
    try:
        info = parse(RunInfo, bucket.get(key), key)
    except errors.ObjectMissingError:
        return None
    if Keys(info.run).info != key:
        raise errors.ProtocolError(f"{key} describes another run, {info.run!r}: it was not used")
    return info


Question = TypeVar("Question")
Answer = TypeVar("Answer")


@dataclass(eq=False)
class AnswerCache(Generic[Question, Answer]):
    """Computes each answer once, and keeps the most recently used answers. One thread computes at a time;
    meanwhile, kept answers are still given.

    The kept answers' sizes, which `weigh` returns, sum to at most `room`; the newest answer is always kept. A
    `ProtocolError` or `CodecError` is kept, too, and raised again for `FAILED_S` seconds without a new try.
    """

    work: Callable[[Question], Answer]
    room: int
    weigh: Callable[[Answer], int] = lambda _: 1
    clock: Clock = time.monotonic
    # By question: answer or error, its weight, and the time at which the question is answered again.
    _kept: OrderedDict[Question, tuple[Answer | Exception, float, float]] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)  # held while `_kept` is used
    _working: Lock = field(default_factory=Lock)  # held while an answer is computed

    def __call__(self, question: Question) -> Answer:
        answer = self._find(question)
        if answer is None:
            with self._working:
                answer = self._find(question)  # another thread may have computed it meanwhile
                if answer is None:
                    answer = self._compute(question)
        if isinstance(answer, Exception):
            raise type(answer)(*answer.args)  # a kept error holds no frames, and so no data
        return answer

    def _find(self, question: Question) -> Answer | Exception | None:
        with self._lock:
            answer, _, until = self._kept.get(question, (None, 0.0, -math.inf))
            if answer is None or until < self.clock():
                return None
            self._kept.move_to_end(question)
            return answer

    def _compute(self, question: Question) -> Answer | Exception:
        answer: Answer | Exception
        until = math.inf
        try:
            answer = self.work(question)
            weight: float = self.weigh(answer)
        except (errors.ProtocolError, errors.CodecError) as error:
            answer = type(error)(*error.args)
            weight = self.room / 1024  # lets at most 1,024 errors fit, whatever `weigh` counts
            until = self.clock() + FAILED_S
        with self._lock:
            self._kept[question] = answer, weight, until
            self._kept.move_to_end(question)
            while len(self._kept) > 1 and sum(weight for _, weight, _ in self._kept.values()) > self.room:
                self._kept.popitem(last=False)
        return answer


class Download:
    """An object of the bucket on this machine's disk. The file is deleted after its last use."""

    def __init__(self, bucket: Bucket, info: ObjectInfo) -> None:
        self._folder = Scratch()
        self.path = self._folder.path / info.key.rsplit("/", 1)[-1]
        self.size = info.size
        bucket.fetch(info.key, self.path, info.size)


class Library:
    """Reads parts of a run on demand, and caches them. `run` returns the run's name, None without a run."""

    def __init__(self, bucket: Bucket, run: Callable[[], str | None], clock: Clock = time.monotonic) -> None:
        self.bucket = bucket
        self._run = run
        self._clock = clock
        self._lock = Lock()
        self._listed: tuple[float, str, Listing] = (0.0, "", [])
        self._manifests = AnswerCache[ObjectInfo, Manifest](
            lambda info: RunReader(self.bucket, self.run).read_listed(info.key), _MANIFESTS
        )
        self._deltas = AnswerCache(self._open, _TENSORS, lambda delta: len(delta.tensors))
        self._proofs = AnswerCache(self._rebuild, _PROOFS)
        self._downloads = AnswerCache[ObjectInfo, Download](
            lambda info: Download(self.bucket, info), _DISK, lambda download: download.size
        )

    @property
    def run(self) -> str:
        """The run's name. Raises `ProtocolError` before there is a run."""
        if (name := self._run()) is None:
            raise errors.ProtocolError(f"{self.bucket.url} holds no run yet")
        return name

    def objects(self) -> Listing:
        """The run's objects, listed again if the last listing is too old and the rate limit allows it."""
        with self._lock:
            at, run, listing = self._listed
            if run == self.run and self._clock() - at <= LIST_EVERY_S * (1 + len(listing) // _PAGE):
                return listing
            try:
                self._listed = self._clock(), self.run, self.bucket.list(Keys(self.run).folder)
            except RateLimitError:
                if run != self.run:
                    raise
            return self._listed[2]

    def delta(self, version: int) -> tuple[Manifest, OpenedDelta]:
        manifest = self._manifest(version)
        return manifest, self._deltas(manifest)

    def verify(self, version: int) -> str:
        """Rebuild a version from the bucket, and return a sentence that confirms its digest.
        Raises `ProtocolError` or `CodecError` if the digest differs, or if the model is too large."""
        return self._proofs(self._manifest(version))

    def digests(self, versions: set[int]) -> dict[int, str]:
        """Return the published digests of the versions that can still be read."""
        found = dict[int, str]()
        for version in versions & manifests_of(self.objects()).keys():
            with suppress(errors.ProtocolError):  # a damaged manifest has no digest
                found[version] = self._manifest(version).digest
        return found

    def download(self, key: str) -> Download:
        """Download an object of the run. Refuses anchors, trainer states, and objects of other runs."""
        found = next((info for info in self.objects() if info.key == key), None)
        if found is None or not can_download(key.removeprefix(Keys(self.run).folder)):
            why = f"run {self.run!r} lacks it, or visitors may not read it"
            raise errors.ObjectMissingError(f"{key} cannot be downloaded here: {why}")
        if found.size > MAX_DOWNLOAD:
            raise errors.ProtocolError(f"{key} is too large for this page: fetch it from {self.bucket.url}")
        return self._downloads(found)

    def _manifest(self, version: int) -> Manifest:
        manifests = manifests_of(self.objects())
        if info := manifests.get(version):
            return self._manifests(info)
        if 0 <= version < (oldest := min(manifests, default=0)):
            raise no_longer_held(f"run {self.run!r} in {self.bucket.url}", version, oldest)
        raise errors.ProtocolError(f"run {self.run!r} has no version {version} in {self.bucket.url}")

    def _open(self, manifest: Manifest) -> OpenedDelta:
        if not manifest.delta:
            raise errors.ProtocolError(f"v{manifest.version} has no delta: it was published as an anchor")
        with Scratch() as folder:
            return open_delta(RunReader(self.bucket, self.run).fetch_all(manifest.delta, folder))

    def _rebuild(self, manifest: Manifest) -> str:
        recipe = manifest.recipe()
        # Do not look at `full_bytes`, because a manifest can claim any number there.
        if recipe.size > MAX_REBUILD or len(recipe.files) > CALLS:
            fix = f"run delta-weight-sync verify {self.bucket.url}#{self.run}"
            raise errors.ProtocolError(f"this model is too large to be rebuilt here: {fix}")
        with Scratch() as folder:
            RunReader(self.bucket, self.run).checkout(manifest, folder)
        steps = len({delta.version for delta in recipe.deltas})
        rebuilt = f"v{manifest.version} was rebuilt from anchor v{manifest.anchor.version} and {steps} deltas"
        return f"{rebuilt}: all {manifest.total} weights give the published digest {manifest.digest}"


class RateLimitError(errors.BucketError):
    """Visitors have reached the rate limit. The message says when they can read again."""


class _Budget:
    """An amount that grows by `size` in `WINDOW_S` seconds, up to `size`. It begins with `size`."""

    def __init__(self, size: float, clock: Clock) -> None:
        self._per_second = size / WINDOW_S
        self._clock = clock
        self._paid_until = clock()  # the moment at which the growth will have paid for all that was spent

    def wait_s(self, cost: float) -> float:
        """Seconds until the budget has `cost`, which must be at most `size`; 0 if it has."""
        return max(0.0, self._paid_after(cost) - self._clock() - WINDOW_S)

    def spend(self, cost: float) -> None:
        """Spend `cost`, for which the budget must be large enough."""
        self._paid_until = self._paid_after(cost)

    def _paid_after(self, cost: float) -> float:
        return max(self._clock(), self._paid_until) + cost / self._per_second


class RateLimitedBucket:
    """A bucket that visitors share, for reading only. Each `WINDOW_S` seconds allow `CALLS` calls, and
    `BYTES` bytes for `fetch`; after a quiet time, up to twice as much."""

    def __init__(self, bucket: Bucket, clock: Clock = time.monotonic) -> None:
        self._bucket = bucket
        self.url = bucket.url
        self._lock = Lock()
        self._pages = 1  # requests that the last listing took
        self._calls = _Budget(CALLS, clock)
        self._bytes = _Budget(BYTES, clock)

    def get(self, key: str, limit: int = SMALL) -> bytes:
        self._spend()
        return self._bucket.get(key, limit)

    def fetch(self, key: str, dest: Path, limit: int) -> str:
        """Download an object. All of `limit` is charged, whatever the object's size."""
        if limit > BYTES:
            raise errors.ProtocolError(f"{key} is too large for this page: fetch it from {self.url}")
        self._spend(limit)
        return self._bucket.fetch(key, dest, limit)

    fetch_together = Bucket.fetch_together  # does nothing, so readers call `fetch` for each object

    def stat(self, key: str) -> ObjectInfo | None:
        self._spend()
        return self._bucket.stat(key)

    def list(self, prefix: str) -> Listing:
        self._spend(calls=self._pages)
        listing = self._bucket.list(prefix)
        self._pages = min(1 + len(listing) // _PAGE, CALLS)
        return listing

    def _spend(self, size: int = 0, calls: int = 1) -> None:
        with self._lock:
            used = f"{CALLS} reads"
            wait_s = self._calls.wait_s(calls)
            if not wait_s:
                used = size_text(BYTES)
                wait_s = self._bytes.wait_s(size)
            if not wait_s:
                self._calls.spend(calls)
                self._bytes.spend(size)
        if wait_s:
            problem = f"visitors have used up the {used} that they share in {WINDOW_S / 60:.0f} minutes"
            fix = f"try again in {max(wait_s, 1):.0f} s, or read the bucket with your own token"
            raise RateLimitError(f"{problem}: {fix}")
