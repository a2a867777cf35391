"""A signed run, a replica that follows it, and somebody who may write to its bucket but has not the key."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from delta_weight_sync.store import Bucket
from delta_weight_sync.vllm.follower import Follower
from tests.support.fake_vllm import reaches
from tests.support.real_run import RealRun
from tests.vllm.thief import NEWEST, Thief, following, signed_run


@pytest.fixture
def thief(bucket: Bucket) -> Thief:
    return Thief(bucket)


@pytest.fixture
def run(bucket: Bucket, thief: Thief, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealRun]:
    """At version 3, signed."""
    monkeypatch.setattr("delta_weight_sync.watch.LONGEST_S", 0.05)
    with signed_run(bucket, thief, monkeypatch) as run:
        yield run


@pytest.fixture
def follower(bucket: Bucket, run: RealRun, tmp_path: Path) -> Iterator[Follower]:
    """It serves version 3."""
    follower = following(bucket, tmp_path / "r")
    reaches(follower, NEWEST)
    yield follower
    follower.stop()
