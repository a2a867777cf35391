"""The faults of one process, of its bucket, disk, clock and life, and of a stranger in the bucket."""

import contextlib
import hashlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from delta_weight_sync.errors import (
    BucketError,
    BucketUnreachableError,
    DeltaWeightSyncError,
    ObjectMissingError,
    ProtocolError,
)
from delta_weight_sync.prune import Keep, Pruner, prune
from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket

RUN = "chaos"
OPERATIONS = {"put", "get", "fetch", "stat", "list", "delete"}
STALL_S = 0.3
SMALL_FILE = 600  # bytes that a file may have while the disk is full
WRITES = {"open", "os.rename", "os.remove", "os.mkdir", "os.symlink", "shutil.copyfile", "shutil.rmtree"}
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}


class Fault(NamedTuple):
    """The `nth` of the next operations that are among `ops` goes wrong, and `times - 1` after it."""

    what: str
    nth: int
    times: int
    ops: tuple[str, ...]


class Faulty:
    """A bucket in front of a real one. Operations on the run's log never fail: it is not the protocol."""

    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket
        self.url = bucket.url
        self._fault: Fault | None = None
        self._seen = 0
        self.struck = 0
        self._lock = threading.Lock()
        self._before: dict[tuple[str, str], list[Any]] = {}  # the last two answers

    def arm(self, fault: Fault | None) -> None:
        """Let operations go wrong from now on; None ends it."""
        with self._lock:
            self._fault = fault
            self._seen = 0
            self.struck = 0

    def put_all(self, objects: Sequence[tuple[str, bytes]], _: object = None) -> None:
        """One after the other: a batch of the Hub that ends in the middle leaves the first objects, too."""
        for key, data in objects:
            self.put(key, data)

    def __getattr__(self, op: str) -> Any:
        real = getattr(self._bucket, op)
        if op not in OPERATIONS:  # what only some stores can do
            return real

        def operation(key: Any, *more: Any) -> Any:
            one = "" if op == "delete" else key  # which takes several keys
            return self._do(op, one, lambda: real(key, *more), *more[:1])

        return operation

    def _do(self, op: str, key: str, real: Callable[[], Any], data: bytes | Path | None = None) -> Any:
        """The answer of `real`, unless a fault is due. `data`: what to put, or the file to fetch to."""
        what = self._due(op, key)
        if not what:
            answer = real()
            if op in ("get", "list", "stat"):
                self._before[op, key] = [*self._before.get((op, key), ()), answer][-2:]
            return answer
        if what == "stale" and (op, key) in self._before:  # as of a store that is behind
            return self._before[op, key][0]
        if what == "hide" and op in ("get", "fetch"):
            raise ObjectMissingError(f"{self.url}/{key} does not exist")
        if what in ("tear", "flip", "kill within") and op == "put":
            return self._put_damaged(what, key, data if isinstance(data, bytes) else data.read_bytes())
        if what in ("kill before", "kill within", "term before"):
            die(SIGNALS[what[:4]])
        if what == "stall":
            time.sleep(STALL_S)
        answer = None if what == "refuse" else real()
        if what in ("kill after", "term after"):
            die(SIGNALS[what[:4]])
        if what in ("refuse", "lose answer"):
            raise BucketUnreachableError(f"{self.url}/{key} answered 503 to {op}: try again later")
        if what == "hide" and op == "list":
            return answer[:-1]
        if what in ("tear", "flip") and op == "get":
            return _damaged(what, answer)
        if what in ("tear", "flip") and isinstance(data, Path):
            data.write_bytes(damaged := _damaged(what, data.read_bytes()))
            return hashlib.sha256(damaged).hexdigest()
        return answer

    def _due(self, op: str, key: str) -> str | None:
        with self._lock:
            fault = self._fault
            if fault is None or op not in fault.ops or "/log/" in key:
                return None
            self._seen += 1
            if not fault.nth <= self._seen < fault.nth + fault.times:
                return None
            self.struck += 1
            return fault.what

    def _put_damaged(self, what: str, key: str, data: bytes) -> None:
        self._bucket.put(key, _damaged(what, data))
        if what == "kill within":
            die(signal.SIGKILL)
        if what == "tear":
            raise BucketError(f"{self.url}/{key} has half of its bytes: upload it again")


def _damaged(what: str, data: bytes) -> bytes:
    """One bit flipped, or the first half."""
    middle = len(data) // 2
    if what in ("flip", "flipped") and data:
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    return data[:middle]


def flip_bit(path: Path, before_end: int = 0) -> None:
    """One bit of a file, that many bytes before the last."""
    data = bytearray(path.read_bytes())
    data[-1 - before_end] ^= 1
    path.write_bytes(data)


def die(how: signal.Signals) -> None:
    os.kill(os.getpid(), how)
    time.sleep(5)  # a signal to be handled by the main thread needs it to run


class Mortal:
    """A part of the play whose bucket, disk, clock and process can be made to fail."""

    _hooked = False

    def __init__(self) -> None:
        self.bucket: Faulty | None = None
        self._later: Fault | None = None
        self._left = 0
        self._folders = ("",)
        self._real_time = time.time

    def open_bucket(self, url: str, **how: Any) -> Faulty:
        """In place of the library's own: one bucket for all, which faults are armed on."""
        self.bucket = self.bucket or Faulty(open_bucket(url, **how))
        self.bucket.arm(self._later)
        return self.bucket

    def arm_later(self, fault: Fault) -> None:
        self._later = fault

    def arm(self, fault: Fault | None) -> None:
        if self.bucket:
            self.bucket.arm(fault)

    def struck(self) -> int:
        return self.bucket.struck if self.bucket else 0

    def jump(self, seconds: float) -> None:
        time.time = lambda: self._real_time() + seconds

    def fill_disk(self, full: bool) -> None:
        """Files cannot become larger than `SMALL_FILE` bytes: writing them fails midway."""
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE if full else hard, hard))

    def die_writing(self, nth: int, folder: str) -> None:
        """`kill -9` just before the nth change of this folder."""
        # A bucket names its files relative to the folder that they are in.
        self._left = nth
        self._folders = (folder, ".")
        if not self._hooked:
            sys.addaudithook(self._audit)
            self._hooked = True

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._left or event not in WRITES:
            return
        path = str(arguments[0])
        if not path.startswith(self._folders) or (path.startswith(".") and not path.endswith(".part")):
            return
        if event == "open":
            mode, flags = arguments[1:]
            if not ({*"w+"} & {*mode} if mode else flags & os.O_CREAT):
                return
        self._left -= 1
        if not self._left:
            die(signal.SIGKILL)


KINDS = ("heads/", "manifests/", "deltas/", "anchors/", "run.json", "log/")
DAMAGES = ("deleted", "torn", "empty", "flipped", "swapped")


class Vandal:
    """A stranger with write access to the bucket, who deletes, damages or puts back objects."""

    def __init__(self, url: str) -> None:
        self._bucket = open_bucket(url, create=True)
        self._folder = f"runs/{RUN}/"
        self._heads: list[tuple[str, bytes]] = []

    def remember(self) -> None:
        for info in self._bucket.list(f"{self._folder}heads/"):
            self._heads = [*self._heads[-50:], (info.key, self._bucket.get(info.key))]

    def replay(self, rng_seed: int) -> str:
        """Put an old HEAD back, under its own name or that of the newest."""
        rng = Random(rng_seed)
        key, data = rng.choice(self._heads)
        newest = self._bucket.list(f"{self._folder}heads/")
        if newest and rng.random() < 0.5:
            key = newest[-1].key
        self._bucket.put(key, data)
        return key

    def damage(self, kind: str, how: str, rng_seed: int) -> str | None:
        """Damage one of the five newest objects of a kind; returns its key, None if there is none."""
        rng = Random(rng_seed)
        there = [info.key for info in self._bucket.list(self._folder)]
        needed = set(self._needed(kind)) & set(there)  # an earlier fault may have deleted what is needed
        keys = [key for key in sorted(needed) or there if key.startswith(self._folder + kind)][-5:]
        if not keys:
            return None
        key = rng.choice(keys)
        if how == "deleted":
            self._bucket.delete([key])
            return key
        if how == "swapped":
            data = self._bucket.get(keys[0]) if keys[0] != key else b"{}"
        else:
            data = b"" if how == "empty" else _damaged(how, self._bucket.get(key))
        self._bucket.put(key, data)
        return key

    def _needed(self, kind: str) -> list[str]:
        """The objects of a kind that the newest version is built from."""
        if kind not in ("deltas/", "anchors/"):
            return []
        try:
            newest = RunReader(self._bucket, RUN).newest()
        except DeltaWeightSyncError:
            return []
        files = newest.anchor.files + newest.deltas if newest else ()
        return sorted(file.key for file in files)

    def wipe(self) -> None:
        self._bucket.delete([info.key for info in self._bucket.list(self._folder)])

    def collect(self) -> None:
        """Delete what is older than a second and not needed; nothing if a manifest is damaged."""
        pruner = Pruner(RunReader(self._bucket, RUN), Keep.parse("1KB"), grace_s=1.0)
        with contextlib.suppress(ProtocolError):
            if survey := pruner.survey():
                prune(self._bucket, survey)

    def close(self) -> None:
        pass
