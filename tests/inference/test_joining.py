"""What a replica says while it joins, and that it can be ended at any moment of that."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from delta_weight_sync.store import open_bucket
from delta_weight_sync.store.base import replacing
from delta_weight_sync.store.files import FileBucket
from inference_space.follower import Follower
from inference_space.progress import CountingReader
from inference_space.settings import Settings
from inference_space.vllm_server import VllmServer
from tests.dashboard.real_run import RealRun

PATIENCE_S = 60


class Slow(FileBucket):
    """A bucket on a slow link: half of the weights come, the rest when it is let go."""

    def __init__(self, url: str) -> None:
        super().__init__(url, create=True)
        self.halfway, self.go_on = threading.Event(), threading.Event()

    def fetch(self, key: str, dest: Path) -> None:
        content = self.get(key)
        with replacing(dest) as part:
            part.write_bytes(content[: len(content) // 2])
            if key.endswith("model.safetensors"):
                self.halfway.set()
                self.go_on.wait(PATIENCE_S)
            part.write_bytes(content)


class Silent(VllmServer):
    """A vLLM that takes for ever to start."""

    def _command(self, checkpoint: Path, port: int) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(600)", str(checkpoint)]


@pytest.fixture
def bucket(tmp_path: Path) -> Slow:
    return Slow((tmp_path / "bucket").as_uri())


@pytest.fixture
def follower(bucket: Slow, tmp_path: Path) -> Iterator[Follower]:
    run = RealRun(open_bucket(bucket.url), run="joined", width=256)
    settings = Settings(bucket=bucket.url, run="joined", folder=str(tmp_path))
    follower = Follower(CountingReader(bucket, "joined"), Silent(settings), settings)
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
    assert state(follower) == "fetching version 0: 2.5 of 6.3 MB", "in tenths of the whole"
    bucket.go_on.set()
    assert soon(lambda: state(follower) == "starting vLLM with version 0")


def test_it_ends_while_vllm_starts(bucket: Slow, follower: Follower, tmp_path: Path) -> None:
    bucket.go_on.set()
    checkpoint = str(tmp_path / "checkpoint")

    def starting() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if checkpoint in child.cmdline()]

    assert soon(lambda: bool(starting()))
    follower.stop()
    assert starting() == []
