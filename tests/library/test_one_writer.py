"""Two trainers on one run: never do both own it, and what one was told is published is never lost."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from delta_weight_sync.errors import BucketError, FencedError
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Manifest
from delta_weight_sync.store import open_bucket

PATIENCE_S = 120
SCHEDULES = 150
TRIES = 200


class Turns:
    """Threads go one store operation at a time, in an order that is drawn from a seed."""

    def __init__(self, seed: int, threads: int) -> None:
        self._random, self._running = random.Random(seed), threads
        self._waiting: dict[int, threading.Event] = {}
        self._lock = threading.Lock()

    def wait(self, thread: int) -> None:
        with self._lock:
            turn = self._waiting[thread] = threading.Event()
            self._next()
        assert turn.wait(PATIENCE_S)

    def end(self) -> None:
        with self._lock:
            self._running -= 1
            self._next()

    def _next(self) -> None:
        if self._waiting and len(self._waiting) == self._running:
            self._waiting.pop(self._random.choice(sorted(self._waiting))).set()


class InTurns:
    """A bucket whose every operation waits for its turn."""

    def __init__(self, bucket: Any, wait: Callable[[], None]) -> None:
        self._bucket, self._wait = bucket, wait

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bucket, name)
        if not callable(found):
            return found

        def operation(*args: Any) -> Any:
            self._wait()
            return found(*args)

        return operation


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


def committed(writer: RunWriter, *files: Any, **what: Any) -> Manifest:
    """As the outbox does: what the store did not take is put again (both may write run.json at once)."""
    try:
        return writer.commit(*files, **what)
    except BucketError:
        manifest = writer.confirm()
        assert manifest is not None
        return manifest


def publish(bucket: Any, run: str, weights: Path, versions: int) -> list[Manifest]:
    """The versions that a trainer published until it was done or was replaced."""
    published: list[Manifest] = []
    try:
        writer = RunWriter(bucket, run, model="m", assets=None)
        for _ in range(versions):
            version = writer.newest.version + 1 if writer.newest else 0
            new = version == 0
            published.append(
                committed(
                    writer,
                    None if new else writer.put_delta(version, str(writer.writer).encode(), 1),
                    writer.put_anchor(version, weights) if new else None,
                    digest=f"{random.getrandbits(64):016x}",
                    sync=version,
                    total=10,
                    created_at=0.0,
                )
            )
    except FencedError:
        pass
    return published


def check(bucket: Any, run: str, published: list[list[Manifest]], versions: int) -> None:
    line = {manifest.version: manifest.digest for manifest in RunReader(bucket, run).versions()}
    told = [(manifest.version, manifest.digest) for by_one in published for manifest in by_one]
    assert len({version for version, _ in told}) == len(told), f"two owners: {told}"
    assert set(told) <= line.items(), f"lost: {sorted(set(told) - line.items())}"
    assert max(map(len, published)) == versions, "the last one owns the run until it is done"


def test_whatever_the_order_of_their_requests(tmp_path: Path, weights: Path) -> None:
    """New runs, and runs that have versions; two and three trainers."""
    bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
    for seed in range(SCHEDULES):
        run, trainers = f"run{seed}", 2 + seed % 2
        if seed % 4 > 1:
            publish(bucket, run, weights, 2)
        turns = Turns(seed, trainers)

        def train(thread: int, run: str = run, turns: Turns = turns) -> list[Manifest]:
            try:
                return publish(InTurns(bucket, lambda: turns.wait(thread)), run, weights, 3)
            finally:
                turns.end()

        with ThreadPoolExecutor(trainers) as pool:
            check(bucket, run, list(pool.map(train, range(trainers))), 3)


@pytest.mark.long
def test_two_trainers_that_are_started_at_the_same_instant(bucket_url: str, weights: Path) -> None:
    bucket, both = open_bucket(bucket_url, create=True), threading.Barrier(2)

    def train(run: str) -> list[Manifest]:
        mine = open_bucket(bucket_url)
        both.wait(PATIENCE_S)
        return publish(mine, run, weights, 2)

    with ThreadPoolExecutor(2) as pool:
        for number in range(TRIES):
            check(bucket, f"run{number}", list(pool.map(train, [f"run{number}"] * 2)), 2)
