"""A replica of several workers, and one of several engines: together they hold the version."""

from pathlib import Path

import pytest

from delta_weight_sync.reader import RunReader
from tests.live.replica import SMALL_CACHE, Replica, greedy
from tests.live.run import training, update

pytestmark = [pytest.mark.live, pytest.mark.long]  # three processes import vLLM, each time

TWO = {
    "workers": "--tensor-parallel-size 2 --distributed-executor-backend mp",
    "engines": "--data-parallel-size 2",
}


@pytest.mark.parametrize("arguments", TWO.values(), ids=TWO.keys())
def test_together_they_hold_each_version(tmp_path: Path, arguments: str):
    """Encoding "small", whose reader needs whole tensors, of which each worker of two has a part.

    Staging a version hashes what both hold in memory: each but the last is proven by its successor.
    """
    environ = {"REPLICA_VLLM_ARGS": f"{SMALL_CACHE} {arguments}"}
    with (
        training(tmp_path, encoding="small") as trainer,
        Replica(trainer.bucket.url, "live", tmp_path / "replica", environ=environ) as replica,
    ):
        replica.wait_for(0)
        before = greedy(replica.url)
        for _ in range(3):
            update(trainer, replica)
        assert replica.status()["status"]["digest"] == RunReader(trainer.bucket, "live").manifest().digest
        assert [commit["joined"] for commit in replica.status()["commits"]] == [True, False, False, False]
        assert greedy(replica.url) != before, "the syncs changed nothing"
