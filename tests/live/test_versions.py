"""A plain vLLM follows a run, with commits between two steps and while it is paused: both are as exact.

`make matrix` runs this file with each release of docs/versions.md.
"""

from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import httpx
import pytest

from delta_weight_sync.reader import RunReader
from delta_weight_sync.vllm import hooks
from tests.live.replica import PROMPTS, Server, ask, greedy, order, served
from tests.live.run import training, update
from tests.support.waiting import soon

pytestmark = [pytest.mark.live, pytest.mark.long]  # two processes import vLLM, three times

DELTAS = 10
LONG = 400
BLOCK = 32
SHARED = [3 + 37 * i % 200 for i in range(2 * BLOCK)]  # whole blocks, which a vLLM would find again
MODES = {"between two steps": "0", "while it is paused": "1"}
ASKED = [*PROMPTS, SHARED]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with training(tmp_path_factory.mktemp("trainer")) as trainer:
        yield trainer


@pytest.mark.parametrize("how", MODES)
def test_ten_deltas_answer_as_a_fresh_load(how, trainer, tmp_path, monkeypatch, record_property):
    if how == "between two steps" and not hooks.IN_STEP.works():
        pytest.skip("this vLLM cannot")
    monkeypatch.setenv("DELTA_WEIGHT_SYNC_PAUSE", MODES[how])
    run = f"{trainer.bucket.url}#live"
    reader = RunReader(trainer.bucket, "live")
    for name in ("vllm", "fresh"):
        (tmp_path / name).mkdir()
    options = {"max-model-len": 512, "block-size": BLOCK}
    first = trainer.publisher.version
    reader.checkout(reader.manifest(0), tmp_path / "base")
    with served(tmp_path / "base", run, tmp_path / "vllm", **options) as vllm:
        vllm.wait_for(first)
        assert f"commits {how}" in vllm.status()["engine"]
        before = greedy(vllm.url, ASKED)
        with ThreadPoolExecutor(2) as pool:  # begun before the first commit; its blocks are those of SHARED
            running = [pool.submit(ask, vllm.url, [*SHARED, i], LONG) for i in range(2)]
            soon(lambda: _running(vllm) == 2, "both requests to begin")
            for _ in range(DELTAS):
                newest = update(trainer, vllm)
            after = greedy(vllm.url, ASKED)
            for future in running:
                answer = future.result()
                assert len(answer.tokens) == LONG, "no commit ended it"
                assert answer.weights[0]["version"] == first, "it began with these"
        assert after != before
        commits = vllm.status(after=first)["commits"]
        versions = range(first + 1, first + 1 + DELTAS)
        assert [(c["version"], c["joined"]) for c in commits] == [(version, False) for version in versions]
        record_property("pause_ms", round(median(commit["pause_ms"] for commit in commits), 2))
        assert went(vllm, "heal") == reader.manifest().digest
        assert went(vllm, "pin", version=first) == reader.manifest(first).digest
        assert greedy(vllm.url, ASKED) == before
        assert went(vllm, "resume") == reader.manifest().digest
    reader.checkout(reader.manifest(newest), tmp_path / "model")
    with served(tmp_path / "model", run, tmp_path / "fresh", **options) as fresh:
        assert fresh.wait_for(newest)["digest"] == reader.manifest().digest
        assert greedy(fresh.url, ASKED) == after


def went(vllm: Server, what: str, **parameters: int) -> str:
    """Give it an order that makes it join again; returns the digest."""
    done = len(vllm.status()["commits"])
    order(vllm, what, **parameters).raise_for_status()
    soon(lambda: len(vllm.status()["commits"]) > done)
    return str(vllm.status()["status"]["digest"])


def _running(vllm: Server) -> float:
    """How many requests vLLM computes now, by its own metrics."""
    lines = httpx.get(f"{vllm.url}/metrics").raise_for_status().text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))
