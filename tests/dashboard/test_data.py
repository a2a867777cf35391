"""One reader follows the bucket through everything that can happen to it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from delta_weight_sync.protocol import RunInfo
from delta_weight_sync.runlog import SEGMENT
from delta_weight_sync.store import Bucket, BucketUnreachable, ObjectInfo, open_bucket
from inference_space.dashboard import data
from inference_space.dashboard.data import RunCache, RunView
from inference_space.dashboard.page import render
from tests.dashboard.written_run import WrittenRun, digest_of

PATIENCE_S = 60


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "EVERY_S", 0.02)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return open_bucket(f"file://{tmp_path}/bucket", create=True)


def until(cache: RunCache, wanted: Callable[[RunView], bool], seconds: float = PATIENCE_S) -> RunView:
    deadline = time.monotonic() + seconds
    while not wanted(view := cache.view()):
        assert time.monotonic() < deadline, view
        time.sleep(0.01)
    return view


def version(view: RunView) -> int | None:
    return view.progress.version if view.progress else None


def started(bucket: Bucket, run: str = "wordle", *, versions: int = 2, created_at: float = 1e9) -> WrittenRun:
    written = WrittenRun(bucket, run, created_at=created_at)
    for _ in range(versions + 1):
        written.publish(40_000, 2_000)
    written.log.flush()
    return written


def test_an_empty_bucket_becomes_a_run(bucket: Bucket) -> None:
    cache = RunCache(bucket, None)
    empty = until(cache, lambda view: view.read)
    assert (empty.read, empty.problem, empty.run, empty.progress) == (True, None, None, None)
    written = started(bucket)
    view = until(cache, lambda view: version(view) == 2)
    assert (view.run, view.model) == ("wordle", "Qwen/Qwen3-0.6B")
    written.log.close()


def test_the_run_created_last_is_shown_unless_one_is_named(bucket: Bucket) -> None:
    for name, created_at in (("b-old", 1.0), ("a-new", 2.0)):
        started(bucket, name, created_at=created_at).log.close()
    assert until(RunCache(bucket, None), lambda view: version(view) == 2).run == "a-new"
    assert until(RunCache(bucket, "b-old"), lambda view: version(view) == 2).run == "b-old"


def test_digests_come_from_the_manifests(bucket: Bucket) -> None:
    written = started(bucket, versions=4)
    written.commit("same", 4)
    written.commit("late", 2)
    written.log.append(written.commit_event("wrong", 3).model_copy(update={"digest": digest_of(99)}))
    written.log.close()
    view = until(RunCache(bucket, "wordle"), lambda view: version(view) == 4)
    assert view.progress
    assert {r.name: r.digest_ok for r in view.progress.replicas} == {
        "same": True,
        "late": True,
        "wrong": False,
    }


def test_a_vanished_bucket_is_named_and_the_figures_stay_until_it_is_back(
    bucket: Bucket, tmp_path: Path
) -> None:
    written = started(bucket)
    cache = RunCache(bucket, None)
    until(cache, lambda view: version(view) == 2)
    (tmp_path / "bucket").rename(tmp_path / "away")
    gone = until(cache, lambda view: view.problem is not None)
    assert "does not exist" in str(gone.problem)
    assert version(gone) == 2
    (tmp_path / "away").rename(tmp_path / "bucket")
    written.publish(40_000, 2_000)
    written.log.flush()
    assert until(cache, lambda view: version(view) == 3).problem is None
    written.log.close()


def test_a_damaged_description_is_named_and_reading_goes_on_once_it_is_whole(bucket: Bucket) -> None:
    started(bucket).log.close()
    cache = RunCache(bucket, "wordle")
    until(cache, lambda view: version(view) == 2)
    key = "runs/wordle/run.json"
    whole = bucket.get(key)
    bucket.put(key, whole[:-1])
    assert key in str(until(cache, lambda view: view.problem is not None).problem)
    bucket.put(key, whole)
    assert version(until(cache, lambda view: view.problem is None)) == 2


def test_a_run_that_starts_over_is_read_anew(bucket: Bucket) -> None:
    started(bucket, versions=5).log.close()
    cache = RunCache(bucket, "wordle")
    until(cache, lambda view: version(view) == 5)
    bucket.delete([info.key for info in bucket.list("runs/")])
    until(cache, lambda view: view.progress is None)
    started(bucket, versions=1, created_at=2e9).log.close()
    assert until(cache, lambda view: version(view) == 1).problem is None


def test_the_run_is_read_before_anybody_looks_and_kept_up_with_while_nobody_does(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "IDLE_S", 0.05)
    written = started(bucket)
    cache = RunCache(bucket, None)
    soon(lambda: version(cache._view) == 2)
    written.publish(40_000, 2_000)
    written.log.close()
    soon(lambda: version(cache._view) == 3)


def test_the_first_reading_tells_how_far_it_is(bucket: Bucket) -> None:
    written = started(bucket, versions=3)
    for step in range(SEGMENT):
        written.step(step, 0.5)
    written.log.close()
    stuck = Stuck(bucket)
    cache = RunCache(stuck, None)
    soon(lambda: cache.now().parts == 1)
    assert "Reading run 'wordle' …" in render(cache.view())
    assert "<b>1 part</b> of its log so far" in render(cache.view())
    stuck.free.set()
    assert until(cache, lambda view: version(view) == 3).parts == 0


def test_a_reading_that_fails_midway_goes_on_where_it_was(bucket: Bucket) -> None:
    written = started(bucket)
    counted = Flaky(bucket)
    cache = RunCache(counted, "wordle")
    until(cache, lambda view: version(view) == 2)
    counted.broken = True
    written.publish(40_000, 2_000)
    written.log.close()
    assert until(cache, lambda view: view.problem is not None).progress
    counted.broken, before = False, counted.parts
    until(cache, lambda view: version(view) == 3)
    assert counted.parts - before == 1, "only the part that is new"


def soon(reached: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Stuck:
    """A bucket that does not give the second part of the log until it is `free`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self.url = bucket, bucket.url
        self.free = threading.Event()

    def get(self, key: str) -> bytes:
        assert not key.endswith("log/00000001.jsonl") or self.free.wait(PATIENCE_S)
        return self._bucket.get(key)

    def __getattr__(self, name: str):
        return getattr(self._bucket, name)


class Flaky:
    """A bucket whose log cannot be looked up while it is `broken`; counts the parts that were read."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self.url = bucket, bucket.url
        self.broken, self.parts = False, 0

    def stat(self, key: str) -> ObjectInfo | None:
        if self.broken and "/log/" in key:
            raise BucketUnreachable(f"{key} cannot be reached: try again")
        return self._bucket.stat(key)

    def get(self, key: str) -> bytes:
        self.parts += "/log/" in key
        return self._bucket.get(key)

    def __getattr__(self, name: str):
        return getattr(self._bucket, name)


def test_more_viewers_read_no_more_and_none_reads_nothing(bucket: Bucket) -> None:
    started(bucket).log.close()
    counted, pauses = Counted(bucket), Pauses()
    cache = RunCache(counted, "wordle", pauses)
    assert pauses.begun() == data.EVERY_S
    first = counted.reads

    views = [cache.view() for _ in range(500)]
    assert {version(view) for view in views} == {2}
    assert len({id(view) for view in views}) == 1, "an unchanged view is the same object, rendered once"
    assert counted.reads == first, "looking reads nothing"

    pauses.end()
    assert pauses.begun() == data.EVERY_S, "somebody looked, so it was read again after a second"
    assert counted.reads - first == 3
    assert cache._view is views[0]

    pauses.end()
    assert pauses.begun() == data.IDLE_S, "nobody looked since"
    assert counted.reads - first == 3


class Pauses:
    """Those of a reader, which end when the test says so."""

    def __init__(self) -> None:
        self._begun, self._over = queue.Queue[float](), queue.Queue[None]()

    def __call__(self, seconds: float, until: threading.Event | None) -> None:
        self._begun.put(seconds)
        self._over.get()

    def begun(self) -> float:
        """Wait until the reader pauses; for how long it would."""
        return self._begun.get(timeout=PATIENCE_S)

    def end(self) -> None:
        """Let the reader go on."""
        self._over.put(None)


class Counted:
    """A bucket that counts how often it is read."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self.url, self.reads = bucket, bucket.url, 0

    def __getattr__(self, name: str):
        self.reads += 1
        return getattr(self._bucket, name)


def test_a_run_without_a_version_waits(bucket: Bucket) -> None:
    info = RunInfo(run="wordle", model="m", created_at=1.0, full_bytes=1)
    bucket.put("runs/wordle/run.json", info.to_bytes())
    view = until(RunCache(bucket, None), lambda view: view.run == "wordle")
    assert (view.progress, view.problem) == (None, None)
