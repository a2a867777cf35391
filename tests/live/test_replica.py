"""A live replica holds exactly the published bits: it answers as a vLLM that loads a checkout afresh."""

import subprocess
import sys
from pathlib import Path

import pytest

from inference_space.settings import Settings
from inference_space.vllm_server import VllmServer
from tests.live.conftest import CONTEXT, SETTINGS
from tests.live.replica import Replica
from tests.live.run import Trainer, greedy, update

pytestmark = pytest.mark.live

VERSIONS = 6


def test_live_weights_answer_as_freshly_loaded_ones(trainer: Trainer, replica: Replica, tmp_path: Path):
    """Of a tied model, whose head vLLM's CPU backend would pack; others are in test_layouts.py."""
    replica.wait_for(trainer.publisher.version)
    before = greedy(replica.url)
    for _ in range(VERSIONS):
        update(trainer, replica)
    live = greedy(replica.url)
    assert [tokens for tokens, _ in live] != [tokens for tokens, _ in before], "the syncs changed nothing"

    command = [
        sys.executable,
        "-m",
        "shared",
        "checkout",
        trainer.bucket.url,
        "--out",
        str(tmp_path / "model"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "fresh").mkdir()
    same = {"max_model_len": CONTEXT, "vllm_args": SETTINGS["REPLICA_VLLM_ARGS"]}
    fresh = VllmServer(Settings(bucket="", run="", folder=str(tmp_path / "fresh"), **same))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")  # as the replica: another number adds up in another order
        try:
            fresh.start(tmp_path / "model")
            assert greedy(fresh.url) == live
        finally:
            fresh.stop()


def test_a_damaged_delta_is_named_and_not_applied(trainer, replica):
    serving = trainer.publisher.version
    replica.wait_for(serving)
    before = greedy(replica.url)
    put = trainer.bucket.put
    damaged = trainer.writer.keys.delta(serving + 1, trainer.writer.writer_term)

    def damaging_put(key: str, data: bytes | Path) -> None:
        if key == damaged:
            assert isinstance(data, bytes)
            data = bytes([*data[:-1], data[-1] ^ 1])
        put(key, data)

    trainer.bucket.put = damaging_put
    trainer.step()
    trainer.publish()
    status = replica.wait_for_error(damaged)
    assert (status["version"], status["state"]) == (serving, "serving")
    assert greedy(replica.url) == before

    trainer.bucket.put = put
    content = trainer.bucket.get(damaged)
    put(damaged, bytes([*content[:-1], content[-1] ^ 1]))
    status = replica.wait_for(serving + 1)
    assert status["digest"] == trainer.writer.newest.digest
