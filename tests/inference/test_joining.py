"""What a replica says while it joins, and that it can be ended at any moment of that."""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delta_weight_sync.store import open_bucket
from delta_weight_sync.store.base import replacing
from delta_weight_sync.store.files import FileBucket
from delta_weight_sync.vllm.follower import Follower
from delta_weight_sync.vllm.progress import CountingReader
from inference_space.embedded_vllm import EmbeddedVllm
from inference_space.settings import Settings
from tests.dashboard.real_run import RealRun

PATIENCE_S = 60


class Slow(FileBucket):
    """A bucket on a slow link: half of the weights come, the rest when it is let go."""

    def __init__(self, url: str) -> None:
        super().__init__(url, create=True)
        self.halfway, self.go_on = threading.Event(), threading.Event()

    def fetch(self, key: str, dest: Path, limit: int) -> None:
        content = self.get(key)
        with replacing(dest) as part:
            part.write_bytes(content[: len(content) // 2])
            if key.endswith("model.safetensors"):
                self.halfway.set()
                self.go_on.wait(PATIENCE_S)
            part.write_bytes(content)


def for_ever(*_: object) -> None:
    """An engine that takes for ever to start."""
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    child.join()
    raise RuntimeError("the engine ended")


@pytest.fixture
def bucket(tmp_path: Path) -> Slow:
    return Slow((tmp_path / "bucket").as_uri())


@pytest.fixture
def follower(bucket: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follower]:
    monkeypatch.setattr("inference_space.embedded_vllm._client", for_ever)
    monkeypatch.setattr("inference_space.embedded_vllm.EmbeddedVllm._arguments", lambda *_: None)
    run = RealRun(open_bucket(bucket.url), run="joined", width=256)
    settings = Settings(bucket=bucket.url, run="joined", folder=str(tmp_path))
    vllm, reader = EmbeddedVllm(settings), CountingReader(bucket, "joined")
    follower = Follower(reader, vllm, name="r", folder=tmp_path, poll_s=1.0)
    follower.start()
    yield follower
    bucket.go_on.set()
    follower.stop()
    run.close()


def soon(reached: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def state(follower: Follower) -> str:
    return follower.report(0).status.state


def test_it_says_how_much_has_come_and_what_it_does_next(bucket: Slow, follower: Follower) -> None:
    assert bucket.halfway.wait(PATIENCE_S)
    assert state(follower) == "fetching version 0: 3.1 of 6.3 MB", "in tenths of the whole"
    bucket.go_on.set()
    assert soon(lambda: state(follower) == "starting vLLM with version 0")


def test_it_ends_while_vllm_starts(bucket: Slow, follower: Follower) -> None:
    bucket.go_on.set()
    assert soon(lambda: bool(multiprocessing.active_children()))
    follower.stop()
    assert multiprocessing.active_children() == []
