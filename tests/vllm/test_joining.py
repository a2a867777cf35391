"""What a replica says while it joins, and that it can be ended at any moment of that."""

import hashlib
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from delta_weight_sync.store._base import replacing
from delta_weight_sync.store._files import FileBucket
from delta_weight_sync.vllm.follower import Follower
from inference_space.settings import Settings
from inference_space.vllm_server import VllmServer
from tests.support.fake_vllm import PATIENCE_S, soon
from tests.support.real_run import RealRun


class Slow(FileBucket):
    """A bucket on a slow link: half of the weights come, the rest when it is let go."""

    def __init__(self, url: str) -> None:
        super().__init__(url, create=True)
        self.halfway, self.go_on = threading.Event(), threading.Event()

    def fetch(self, key: str, dest: Path, limit: int) -> str:
        content = self.get(key)
        with replacing(dest) as part:
            part.write_bytes(content[: len(content) // 2])
            if key.endswith("model.safetensors"):
                self.halfway.set()
                self.go_on.wait(PATIENCE_S)
            part.write_bytes(content)
        return hashlib.sha256(content).hexdigest()


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
    monkeypatch.setattr("inference_space.vllm_server._client", for_ever)
    monkeypatch.setattr("inference_space.vllm_server.VllmServer._arguments", lambda *_: None)
    run = RealRun(open_bucket(bucket.url), run="joined", width=256)
    settings = Settings(bucket=bucket.url, run="joined", folder=str(tmp_path))
    vllm, reader = VllmServer(settings), RunReader(bucket, "joined")
    follower = Follower(reader, vllm, name="r", folder=tmp_path, poll_s=1.0)
    follower.start()
    yield follower
    bucket.go_on.set()
    follower.stop()
    run.close()


def state(follower: Follower) -> str:
    return follower.report(0).status.state


def test_it_says_how_much_has_come_and_what_it_does_next(bucket: Slow, follower: Follower) -> None:
    assert bucket.halfway.wait(PATIENCE_S)
    assert state(follower) == "fetching version 0: 3.1 of 6.3 MB", "in tenths of the whole"
    bucket.go_on.set()
    soon(lambda: state(follower) == "starting vLLM with version 0", "a start")


def test_it_ends_while_vllm_starts(bucket: Slow, follower: Follower) -> None:
    bucket.go_on.set()
    soon(lambda: bool(multiprocessing.active_children()), "an engine")
    follower.stop()
    assert multiprocessing.active_children() == []
