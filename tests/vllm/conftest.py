"""A folder as the bucket of a run, a vLLM, and a follower between them."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import Bucket, open_bucket
from delta_weight_sync.vllm.follower import Follower
from tests.support.buckets import CountedBucket
from tests.support.fake_vllm import InMemoryVllm
from tests.support.real_run import RealRun


@pytest.fixture
def bucket(tmp_path: Path) -> CountedBucket:
    return CountedBucket(open_bucket(f"file://{tmp_path}/bucket", create=True))


@pytest.fixture
def vllm() -> InMemoryVllm:
    return InMemoryVllm()


@pytest.fixture
def follower(
    bucket: Bucket, run: RealRun, vllm: InMemoryVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Follower]:
    """Not started yet. It polls all the time and retries after moments."""
    monkeypatch.setattr("delta_weight_sync.watch.LONGEST_S", 0.05)
    reader = RunReader(bucket, run.reader.keys.run)
    follower = Follower(reader, vllm, name="r", folder=tmp_path / "r", poll_s=0.01)
    yield follower
    follower.stop()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own, as that of vLLM's server."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()  # a task that was cancelled ends
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
