"""One reader of the bucket for any number of viewers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from delta_weight_sync.history import RunReader
from delta_weight_sync.keys import Keys
from delta_weight_sync.protocol import RunInfo, parse
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.runlog import Event, RunLogReader
from delta_weight_sync.store import Bucket, BucketError, ObjectInfo, ObjectMissing
from inference_space.dashboard.run_state import RunState
from inference_space.dashboard.snapshots import Snapshots
from inference_space.dashboard.view import Progress

EVERY_S = 1.0
IDLE_S = 60.0  # between two readings while nobody looks
FIRST_WAIT_S = 1.0
DIGESTS_KEPT = 4096
DIGEST_TRIES = 10
DIGESTS_BACK = 64  # manifests to walk for the digest of a version that a replica is still on


Pause = Callable[[float, threading.Event | None], object]


def _pause(seconds: float, until: threading.Event | None) -> None:
    """Wait that long, or until something happens."""
    (until or threading.Event()).wait(seconds)


@dataclass(frozen=True, eq=False)
class RunView:
    """What every viewer sees until the next refresh; a new `revision` where anything differs."""

    bucket: str
    run: str | None
    revision: int = 0
    created_at: float = 0.0  # of the run, unix seconds
    model: str | None = None
    read: bool = False  # the bucket was read at least once
    parts: int = 0  # of the log that were read so far, while it is read for the first time
    problem: str | None = None  # why the bucket could not be read just now
    skipped: int = 0  # lines of the log that are no events
    quiet_min: int = 0  # whole minutes without an event
    progress: Progress | None = None  # None before the first version


class RunCache:
    """Keeps the newest `RunView` of a run, from the moment it is made: about once a second while somebody
    looks and once a minute while nobody does, so that nobody waits for a long run to be read.

    Without `run` it follows the run that was created last, and another once that one is gone.
    """

    def __init__(self, bucket: Bucket, run: str | None, pause: Pause = _pause) -> None:
        self._bucket, self._run, self._pause = _Told(bucket, self._progressed), run, pause
        self._view = RunView(bucket=bucket.url, run=run)
        self._info: RunInfo | None = None
        self._seen: ObjectInfo | None = None  # of its description, when it was read
        self._question: tuple[frozenset[int], int | None] = (frozenset(), None)
        self._tries = 0
        self._log: RunLogReader | None = None
        self._state, self.snapshots, self._stale = RunState(), Snapshots(), False
        self._asked, self._ready = threading.Event(), threading.Event()
        threading.Thread(target=self._loop, name="dashboard-reader", daemon=True).start()

    def now(self) -> RunView:
        """The newest view there is, without waiting; somebody looks from now on."""
        self._asked.set()
        return self._view

    def view(self) -> RunView:
        """The newest view, at once; only the first call, and the first after a while without viewers, waits
        for a fresh one, for at most `FIRST_WAIT_S` seconds.
        """
        self._asked.set()
        if not self._view.parts:
            self._ready.wait(FIRST_WAIT_S)
        return self._view

    def _loop(self) -> None:
        while True:
            self._asked.clear()
            self._refresh()
            self._ready.set()
            self._pause(EVERY_S, None)
            if not self._asked.is_set():
                self._ready.clear()
                self._pause(IDLE_S, self._asked)

    def _refresh(self) -> None:
        problem = None
        try:
            self._follow()
        except (BucketError, ProtocolError) as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - the thread must outlive it, and viewers must read of it
            problem = f"The bucket could not be read: {type(error).__name__}: {error}"
        self._show(problem)

    def _follow(self) -> None:
        info = self._find()
        if info != self._info:
            self._info, self._stale = info, True
            self._state, self.snapshots = RunState(), Snapshots()
            self._log = RunLogReader(self._bucket, info.run) if info else None
        if info and self._log:
            self._take_in(self._log.poll())
            self._learn_digests(RunReader(self._bucket, info.run))

    def _take_in(self, events: Iterable[Event]) -> None:
        """As they come: what was read before the bucket failed is shown."""
        seen = self._state.events
        try:
            self.snapshots.add(self._state, events)
        finally:
            self._stale = self._stale or self._state.events != seen

    def _progressed(self, key: str) -> None:
        """Tell those who wait for the first reading how far it is."""
        if not self._view.read and "/log/" in key:
            was, run = self._view, self._info.run if self._info else self._run
            self._view = replace(was, run=run, parts=was.parts + 1, revision=was.revision + 1)

    def _find(self) -> RunInfo | None:
        name = self._run or (self._info.run if self._info else None)
        if name:
            known = self._known(Keys(name).info)
            if known or self._run:
                return known
        return newest_run(self._bucket)

    def _known(self, key: str) -> RunInfo | None:
        """The description at `key`, which is read again only where it is another one."""
        seen = self._bucket.stat(key)
        if seen and seen == self._seen:
            return self._info
        self._seen, info = None, _info(self._bucket, key) if seen else None
        self._seen = seen
        return info

    def _learn_digests(self, run: RunReader) -> None:
        """Fetch the digests that were published for the versions on which the replicas say they are."""
        digests, served = self._state.digests, self._state.served()
        if len(digests) > DIGESTS_KEPT:
            self._state.digests = digests = {version: digests[version] for version in served & digests.keys()}
        wanted = served - digests.keys()
        if not self._worth_a_try(wanted):
            return
        oldest = 0
        for manifest in islice(run.history(), DIGESTS_BACK):
            oldest, digests[manifest.version], self._stale = manifest.version, manifest.digest, True
            if oldest <= min(wanted):
                return
        digests.update((version, None) for version in wanted if version < oldest)  # too far back: give up

    def _worth_a_try(self, wanted: set[int]) -> bool:
        """Not for ever: a replica may say that it is on a version that never was."""
        question = (frozenset(wanted), self._state.version)
        self._tries = self._tries + 1 if question == self._question else 1
        self._question = question
        return bool(wanted) and self._tries <= DIGEST_TRIES

    def _show(self, problem: str | None) -> None:
        was = self._view
        progress = self._state.progress() if self._stale else was.progress
        self._stale = False
        now = replace(
            was,
            run=self._info.run if self._info else self._run,
            model=self._info.model if self._info else None,
            created_at=self._info.created_at if self._info else 0.0,
            read=was.read or problem is None,
            parts=0,
            skipped=self._log.skipped if self._log else 0,
            problem=problem,
            quiet_min=_quiet_min(progress),
            progress=progress,
        )
        if vars(now) != vars(was):
            self._view = replace(now, revision=was.revision + 1)


class _Told:
    """A bucket that tells which objects were read."""

    def __init__(self, bucket: Bucket, tell: Callable[[str], None]) -> None:
        self._bucket, self._tell = bucket, tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def get(self, key: str) -> bytes:
        data = self._bucket.get(key)
        self._tell(key)
        return data


def newest_run(bucket: Bucket) -> RunInfo | None:
    """The run that was created last."""
    keys = [found.key for found in bucket.list("runs/") if found.key.endswith("/run.json")]
    found = (_sound_info(bucket, key) for key in keys)
    return max(filter(None, found), key=lambda info: info.created_at, default=None)


def _info(bucket: Bucket, key: str) -> RunInfo | None:
    try:
        info = parse(RunInfo, bucket.get(key), key)
    except ObjectMissing:
        return None
    if Keys(info.run).info != key:
        raise ProtocolError(f"{key} describes run {info.run!r}: it was not used")
    return info


def _sound_info(bucket: Bucket, key: str) -> RunInfo | None:
    """A damaged description of one run does not keep the others from being found."""
    try:
        return _info(bucket, key)
    except ProtocolError:
        return None


def _quiet_min(progress: Progress | None) -> int:
    if progress is None or progress.done:
        return 0
    return max(0, int((time.time() - progress.last_t) / 60))
