"""A live replica holds exactly the published bits: it answers as a vLLM that loads a checkout afresh."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_weight_sync.reader import RunReader
from delta_weight_sync.signing import PUBLIC_KEY, fingerprint
from tests.live.conftest import BLOCK, CONTEXT, PAIR
from tests.live.replica import Replica, Server, greedy, order, served
from tests.live.run import Trainer, update
from tests.support.waiting import soon

pytestmark = pytest.mark.live


def test_live_weights_answer_as_freshly_loaded_ones(trainer: Trainer, replica: Replica, tmp_path: Path):
    """Of a tied model, whose head vLLM's CPU backend would pack; others are in test_layouts.py."""
    first = trainer.publisher.version
    assert replica.wait_for(first)["signed_by"] == fingerprint(PAIR[PUBLIC_KEY])
    answers = {first: greedy(replica.url)}
    for _ in range(6):
        newest = update(trainer, replica)
    answers[newest] = greedy(replica.url)
    assert [tokens for tokens, _ in answers[newest]] != [tokens for tokens, _ in answers[first]]

    out = str(tmp_path / "model")
    words = ["-m", "delta_weight_sync", "checkout", trainer.bucket.url, "--out", out]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    options = {"max-model-len": CONTEXT, "block-size": BLOCK}
    with served(tmp_path / "model", f"{trainer.bucket.url}#live", tmp_path, **options) as vllm:
        assert greedy(vllm.url) == answers[newest], "it was loaded afresh"
        assert vllm.wait_for(newest)["digest"] == trainer.writer.newest.digest
        _goes_where_it_is_told(vllm, trainer, {version: answers[version] for version in (first, newest)})


def _goes_where_it_is_told(vllm: Server, trainer: Trainer, answers: dict[int, Any]) -> None:
    """Back over several versions, healed there, on again, and with the next version: all in one vLLM."""
    first, newest = answers
    history = {manifest.version: manifest.digest for manifest in RunReader(trainer.bucket, "live").versions()}
    assert order(vllm, "pin", version=first).status_code == 200
    assert vllm.wait_for(first)["digest"] == history[first]
    assert greedy(vllm.url) == answers[first], "as the other replica did when that was the newest"
    healed = len(vllm.status()["commits"])
    assert order(vllm, "heal").status_code == 200
    soon(lambda: len(vllm.status()["commits"]) > healed)
    assert vllm.status()["status"]["digest"] == history[first]
    assert order(vllm, "pin", version=newest + 1).status_code == 404
    assert order(vllm, "resume").status_code == 200
    assert vllm.wait_for(newest)["digest"] == history[newest]
    assert greedy(vllm.url) == answers[newest]
    trainer.step()
    version = trainer.publish()
    assert vllm.wait_for(version)["digest"] == trainer.writer.newest.digest
    assert not vllm.status(after=newest)["commits"][0]["joined"], "by its delta"
    assert order(vllm, "poke").status_code == 200
    for control in ("pause", "poke"):
        assert httpx.post(f"{vllm.url}/delta_weight_sync/{control}").status_code == 401
