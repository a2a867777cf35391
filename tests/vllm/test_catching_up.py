"""A replica that is behind takes jumps; one whose files are deleted under it heals in place."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delta_weight_sync.prune import Keep, Pruner, prune
from delta_weight_sync.store import Bucket
from delta_weight_sync.vllm.follower import Follower
from tests.support.buckets import CountedBucket
from tests.support.fake_vllm import Mortal
from tests.support.real_run import Drifting
from tests.support.waiting import soon


class Watched(CountedBucket):
    """`before` is called once, before the next file."""

    before: Callable[[], None] | None = None

    def fetch(self, key: str, dest: Path, limit: int) -> str:
        before, self.before = self.before, None
        if before:
            before()
        return super().fetch(key, dest, limit)


@pytest.fixture
def bucket(bucket: Bucket) -> Watched:
    return Watched(bucket)


@pytest.fixture
def run(bucket: Watched) -> Iterator[Drifting]:
    run = Drifting(bucket.bucket, drift=1e-6)
    yield run
    run.close()


@pytest.fixture
def follower(follower: Follower, vllm: Mortal, run: Drifting) -> Follower:
    """At version 0."""
    follower.start()
    reached(follower, vllm, run)
    return follower


def reached(follower: Follower, vllm: Mortal, run: Drifting) -> None:
    soon(lambda: follower.serving == run.newest, lambda: f"{follower.report(0).status}")
    assert vllm.digest() == run.newest.digest


def test_a_replica_that_was_paused_takes_jumps_in_place(run, bucket, follower, vllm):
    follower.commands.pause()
    asked = vllm.asked
    soon(lambda: vllm.asked >= asked + 2, "the end of a turn that began before the pause")
    run.steps(21)
    bucket.fetched.clear()
    follower.commands.resume()
    reached(follower, vllm, run)
    assert [key.split("/")[2] for key in bucket.fetched] == ["jumps"] * 2 + ["deltas"] * 5
    assert (vllm.starts, vllm.compared) == (1, 1), "in place, and nothing was compared with a checkpoint"


def test_a_replica_whose_files_are_deleted_under_it_heals_in_place(run, bucket, follower, vllm, monkeypatch):
    """It has read a manifest; before it fetches, much is published, and what it was to fetch is deleted."""
    monkeypatch.setattr("delta_weight_sync.records.WINDOW", 2)

    def delete() -> None:
        run.steps(12)
        survey = Pruner(run.reader, Keep(size=1.0), grace_s=0.0).survey()
        prune(bucket.bucket, survey)

    bucket.before = delete
    run.steps(1)
    reached(follower, vllm, run)
    assert run.newest.version == 13
    assert vllm.starts == 1
    assert follower.report(0).status.error is None
