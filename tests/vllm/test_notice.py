"""A replica takes a version when it is told of one, not when its next look would come: here in an hour.

vLLM is stood in for; what tells is the simulated Hub, or whoever pokes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import Bucket, open_bucket
from delta_weight_sync.vllm.follower import Follower
from tests.support.fake_vllm import Mortal, reaches, soon
from tests.support.hubsim import HubSim
from tests.support.real_run import RealRun

HOUR = 3600.0


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


@pytest.fixture
def on_hub(hub_env: None) -> str:
    return f"hf://buckets/team/{uuid4().hex}"


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[RealRun]:
    url = request.getfixturevalue("on_hub" if request.node.get_closest_marker("full") else "url")
    run = RealRun(open_bucket(url, create=True), run="told", layers=1)
    yield run
    run.close()


@pytest.fixture
def follower(run: RealRun, vllm: Mortal, tmp_path: Path) -> Iterator[Follower]:
    bucket: Bucket = run.reader.bucket
    follower = Follower(RunReader(bucket, "told"), vllm, name="r", folder=tmp_path / "r", poll_s=HOUR)
    follower.start()
    reaches(follower, 0)
    yield follower
    follower.stop()


@pytest.mark.full
def test_the_hubs_events_bring_each_version(
    follower: Follower, run: RealRun, vllm: Mortal, hub: HubSim
) -> None:
    soon(lambda: follower.report(0).notice == "notified by the store", "a connection")
    for version in (1, 2):
        run.step()
        reaches(follower, version)
    assert vllm.digest() == run.reader.manifest(2).digest


def test_a_poke_brings_the_next_version(follower: Follower, run: RealRun, vllm: Mortal) -> None:
    run.step()
    assert follower.report(0).notice == "polls every 3600 s"
    follower.poke()
    reaches(follower, 1)
    assert vllm.digest() == run.reader.manifest(1).digest
