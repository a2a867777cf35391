"""A replica that is behind takes jumps; one whose files are deleted under it heals in place."""

from collections.abc import Callable
from pathlib import Path

import pytest

from delta_weight_sync.prune import Keep, Pruner, prune
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import FileRef
from delta_weight_sync.store import open_bucket
from delta_weight_sync.vllm.follower import Follower
from tests.support.fake_vllm import Mortal, soon
from tests.support.real_run import RUN, Drifting


class Watched(RunReader):
    """Notes what it fetches; `before` is called once, before the next file."""

    def __init__(self, url: str) -> None:
        super().__init__(open_bucket(url), RUN)
        self.fetched: list[str] = []
        self.before: Callable[[], None] = lambda: None

    def fetch(self, ref: FileRef, folder: Path) -> Path:
        before, self.before = self.before, lambda: None
        before()
        self.fetched.append(ref.key.split("/")[2])
        return super().fetch(ref, folder)


@pytest.fixture
def run(tmp_path):
    run = Drifting(tmp_path / "bucket", drift=1e-6)
    yield run
    run.close()


@pytest.fixture
def replica(run, tmp_path, monkeypatch):
    """At version 0: the follower, its reader, its vLLM."""
    monkeypatch.setattr("delta_weight_sync.watch.LONGEST_S", 0.05)
    reader, engine = Watched(run.url), Mortal()
    follower = Follower(reader, engine, name="one", folder=tmp_path / "one", poll_s=0.01)
    follower.start()
    reached(follower, engine, run)
    yield follower, reader, engine
    follower.stop()


def reached(follower: Follower, engine: Mortal, run: Drifting) -> None:
    soon(lambda: follower.serving == run.newest, lambda: f"{follower.report(0).status}")
    assert engine.digest() == run.newest.digest


def test_a_replica_that_was_paused_takes_jumps_in_place(run, replica):
    follower, reader, engine = replica
    follower.commands.pause()
    asked = engine.asked
    soon(lambda: engine.asked >= asked + 2, "the end of a turn that began before the pause")
    run.steps(21)
    reader.fetched.clear()
    follower.commands.resume()
    reached(follower, engine, run)
    assert reader.fetched == ["jumps"] * 2 + ["deltas"] * 5
    assert (engine.starts, engine.compared) == (1, 1), "in place, and nothing was compared with a checkpoint"


def test_a_replica_whose_files_are_deleted_under_it_heals_in_place(run, replica, monkeypatch):
    """It has read a manifest; before it fetches, much is published, and what it was to fetch is deleted."""
    follower, reader, engine = replica
    monkeypatch.setattr("delta_weight_sync.records.WINDOW", 2)

    def delete() -> None:
        run.steps(12)
        survey = Pruner(RunReader(open_bucket(run.url), RUN), Keep(size=1.0), grace_s=0.0).survey()
        prune(reader.bucket, survey)

    reader.before = delete
    run.steps(1)
    reached(follower, engine, run)
    assert run.newest.version == 13
    assert engine.starts == 1
    assert follower.report(0).status.error is None
