"""A bucket of which chosen operations go wrong."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_weight_sync.errors import BucketError, BucketUnreachableError, ObjectMissingError

STALL_S = 0.3
READS = ("get", "fetch", "list", "stat")


@dataclass(frozen=True)
class Fault:
    """The `nth` of the operations to come that are among `ops` goes wrong, and `times - 1` after it."""

    what: str
    nth: int = 1
    times: int = 1
    ops: tuple[str, ...] = ("put", "get", "fetch", "list", "delete")
    where: str = ""  # a part of the key


@dataclass(frozen=True)
class Op:
    name: str
    key: str
    real: Callable[[], Any]
    data: bytes | Path | None = None  # to put, or the file to fetch to


class Faulty:
    """A bucket in front of a real one. What the run's log asks for never fails: it is not the protocol."""

    def __init__(self, bucket: Any) -> None:
        self._bucket, self.url = bucket, bucket.url
        self._fault: Fault | None = None
        self._seen, self.struck = 0, 0
        self._lock = threading.Lock()
        self._before: dict[tuple[str, str], list[Any]] = {}  # the last two answers

    def arm(self, fault: Fault | None) -> None:
        """Let operations go wrong from now on; None ends it."""
        with self._lock:
            self._fault, self._seen, self.struck = fault, 0, 0

    def put(self, key: str, data: bytes | Path) -> None:
        self._do(Op("put", key, lambda: self._bucket.put(key, data), data))

    def get(self, key: str) -> bytes:
        found: bytes = self._do(Op("get", key, lambda: self._bucket.get(key)))
        return found

    def fetch(self, key: str, dest: Path, limit: int) -> str:
        sha256: str = self._do(Op("fetch", key, lambda: self._bucket.fetch(key, dest, limit), dest))
        return sha256

    def stat(self, key: str) -> Any:
        return self._do(Op("stat", key, lambda: self._bucket.stat(key)))

    def list(self, prefix: str) -> Any:
        return self._do(Op("list", prefix, lambda: self._bucket.list(prefix)))

    def delete(self, keys: Sequence[str]) -> None:
        self._do(Op("delete", "", lambda: self._bucket.delete(keys)))

    def __getattr__(self, name: str) -> Any:  # what only some stores can do
        return getattr(self._bucket, name)

    def _do(self, op: Op) -> Any:
        fault = self._due(op)
        if fault is None:
            answer = op.real()
            if op.name in ("get", "list", "stat"):
                answers = self._before.setdefault((op.name, op.key), [])
                self._before[op.name, op.key] = [*answers, answer][-2:]
            return answer
        return EFFECTS[fault.what](self, op)

    def _due(self, op: Op) -> Fault | None:
        with self._lock:
            fault = self._fault
            if fault is None or op.name not in fault.ops or fault.where not in op.key or "/log/" in op.key:
                return None
            self._seen += 1
            if not fault.nth <= self._seen < fault.nth + fault.times:
                return None
            self.struck += 1
            return fault

    def stale(self, op: Op) -> Any:
        """The answer before the last one, as of a store that is behind."""
        answers = self._before.get((op.name, op.key))
        return answers[0] if answers else op.real()

    def tear(self, op: Op) -> Any:
        if op.name == "put":
            self._bucket.put(op.key, _bytes(op.data)[: len(_bytes(op.data)) // 2])
            raise BucketError(f"{self.url}/{op.key} has half of its bytes: upload it again")
        return self._changed(op, lambda data: data[: len(data) // 2])

    def flip(self, op: Op) -> Any:
        if op.name == "put":
            return self._bucket.put(op.key, _flipped(_bytes(op.data)))
        return self._changed(op, _flipped)

    def _changed(self, op: Op, change: Callable[[bytes], bytes]) -> Any:
        answer = op.real()
        if op.name == "fetch" and isinstance(op.data, Path):
            op.data.write_bytes(data := change(op.data.read_bytes()))
            return hashlib.sha256(data).hexdigest()
        return change(answer) if op.name == "get" else answer

    def refuse(self, op: Op) -> Any:
        raise BucketUnreachableError(f"{self.url}/{op.key} answered 503 to {op.name}: try again later")

    def lose_answer(self, op: Op) -> Any:
        """It is done, and nobody is told."""
        op.real()
        return self.refuse(op)

    def stall(self, op: Op) -> Any:
        time.sleep(STALL_S)
        return op.real()

    def hide(self, op: Op) -> Any:
        if op.name in ("get", "fetch"):
            raise ObjectMissingError(f"{self.url}/{op.key} does not exist")
        answer = op.real()
        return answer[:-1] if op.name == "list" else answer


def die(how: signal.Signals) -> None:
    os.kill(os.getpid(), how)
    time.sleep(5)  # a signal to be handled by the main thread needs it to run


def _before(how: signal.Signals) -> Callable[[Faulty, Op], Any]:
    def effect(_: Faulty, op: Op) -> Any:
        die(how)
        return op.real()

    return effect


def _after(how: signal.Signals) -> Callable[[Faulty, Op], Any]:
    def effect(_: Faulty, op: Op) -> Any:
        answer = op.real()
        die(how)
        return answer

    return effect


def _within(bucket: Faulty, op: Op) -> Any:
    if op.name == "put":
        bucket._bucket.put(op.key, _bytes(op.data)[: len(_bytes(op.data)) // 2])
    die(signal.SIGKILL)


EFFECTS: dict[str, Callable[[Faulty, Op], Any]] = {
    "kill before": _before(signal.SIGKILL),
    "kill within": _within,
    "kill after": _after(signal.SIGKILL),
    "term before": _before(signal.SIGTERM),
    "term after": _after(signal.SIGTERM),
    "refuse": Faulty.refuse,
    "lose answer": Faulty.lose_answer,
    "stall": Faulty.stall,
    "tear": Faulty.tear,
    "flip": Faulty.flip,
    "stale": Faulty.stale,
    "hide": Faulty.hide,
}


def _bytes(data: bytes | Path | None) -> bytes:
    assert data is not None
    return data if isinstance(data, bytes) else data.read_bytes()


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data
