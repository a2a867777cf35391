"""A replica that quantizes while it loads follows a run: it answers as a vLLM that loads versions afresh."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tests.live.replica import Server, ask, greedy, order, served
from tests.live.run import Trainer, training
from tests.support.waiting import soon

pytestmark = pytest.mark.live

OPTIONS = {"quantization": "fp8_per_channel", "max-model-len": 512}
COMMITS = 5
LONG = 300  # tokens


@pytest.mark.long
def test_a_quantized_replica_answers_as_a_fresh_load_of_the_last_version(tmp_path: Path) -> None:
    """Deltas are staged and committed while clients ask without a break."""
    with training(tmp_path) as trainer:
        run = f"{trainer.bucket.url}#live"
        (tmp_path / "replica").mkdir()
        with served(tmp_path / "base", run, tmp_path / "replica", **OPTIONS) as replica:
            first = replica.wait_for(0)
            assert first["digest"] == trainer.writer.newest.digest
            before = greedy(replica.url)
            answers = _updated_while_it_generates(trainer, replica)
            assert any(len(answer.spans) > 1 for answer in answers), (
                "a commit came in the middle of an answer"
            )
            newest = trainer.publisher.version
            commits = replica.status(after=0)["commits"]
            assert [commit["joined"] for commit in commits] == [False] * COMMITS
            after = greedy(replica.url)
            quantized = replica.status()["status"]["quantized"]
            assert quantized["scheme"] == "fp8_per_channel"
            assert quantized["changed"] > 0
            assert after != before

            healed = len(replica.status()["commits"])
            assert order(replica, "heal").status_code == 200
            soon(lambda: len(replica.status()["commits"]) > healed)
            assert replica.status()["status"]["quantized"] == quantized | {"changed": 0}, (
                "nothing was to be repaired"
            )
            assert order(replica, "pin", version=0).status_code == 200
            assert replica.wait_for(0)["digest"] == first["digest"]
            assert greedy(replica.url) == before

        out = str(tmp_path / "model")
        words = ["-m", "delta_weight_sync", "checkout", trainer.bucket.url, "--out", out]
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        (tmp_path / "fresh").mkdir()
        with served(tmp_path / "model", run, tmp_path / "fresh", **OPTIONS) as fresh:
            assert fresh.wait_for(newest)["digest"] == trainer.writer.newest.digest
            assert fresh.status()["status"]["quantized"]["digest"] == quantized["digest"]
            assert greedy(fresh.url) == after


def _updated_while_it_generates(trainer: Trainer, replica: Server) -> list:
    enough = Event()

    def ask_until_enough(prompt: list[int]) -> list:
        answers = [ask(replica.url, prompt, LONG)]
        while not enough.is_set():
            answers.append(ask(replica.url, prompt, LONG))
        return answers

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask_until_enough, [5, 6, 7, i]) for i in range(4)]
        for _ in range(COMMITS):
            trainer.step()
            replica.wait_for(trainer.publish())
        enough.set()
        return [answer for future in asked for answer in future.result()]
