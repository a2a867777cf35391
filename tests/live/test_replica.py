"""A live replica holds exactly the published bits: it answers as a vLLM that loads a checkout afresh."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from inference_space.settings import Settings
from inference_space.vllm_server import VllmServer
from shared.buckets import open_bucket
from shared.codec import Level
from shared.runlog import RunLogWriter
from tests.live.replica import SMALL_CACHE, Replica, greedy
from trainer.policies import tiny
from trainer.publisher import Publisher
from trainer.run_writer import RunWriter

pytestmark = pytest.mark.live

PROMPTS = [[1, 5, 9, 100, 200, 33], [7] * 12, [50, 40, 30, 20, 10, 5, 4, 3], [250, 17]]
VERSIONS = 6


class Trainer:
    """Takes random steps with a real model and publishes them; what TRL does, without the learning."""

    def __init__(self, url: str, base: Path, level: Level = "fast") -> None:
        self.bucket = open_bucket(url, create=True)
        self.log = RunLogWriter(self.bucket, "live")
        self.writer = RunWriter(self.bucket, "live", model="tiny", assets=base)
        self.publisher = Publisher(self.writer, self.log, level=level)
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.syncs = 0

    def publish(self) -> None:
        self.syncs += 1
        self.publisher.publish(self.model.named_parameters(), self.syncs)
        self.publisher.flush()

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter += 2e-3 * torch.randn_like(parameter)

    def close(self) -> None:
        self.publisher.close()
        self.log.close()


@contextmanager
def follow(folder: Path, *, tied: bool) -> Iterator[tuple[Trainer, Replica]]:
    """A trainer that has published version 0, and a replica that was just started."""
    tiny.build(folder / "base", tie=tied, seed=0)
    trainer = Trainer((folder / "bucket").as_uri(), folder / "base")
    trainer.publish()
    replica = Replica(trainer.bucket.url, "live", folder / "replica")
    replica.start()
    try:
        yield trainer, replica
    finally:
        replica.stop()
        trainer.close()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    with follow(tmp_path_factory.mktemp("tied"), tied=True) as both:
        yield both


@pytest.fixture
def trainer(both):
    return both[0]


@pytest.fixture
def replica(both):
    return both[1]


def test_live_weights_answer_as_freshly_loaded_ones(trainer, replica, tmp_path):
    answers_as_a_fresh_one(trainer, replica, tmp_path)


def test_so_do_those_of_a_model_with_a_head_of_its_own(tmp_path):
    with follow(tmp_path, tied=False) as (trainer, replica):
        answers_as_a_fresh_one(trainer, replica, tmp_path)


def answers_as_a_fresh_one(trainer: Trainer, replica: Replica, folder: Path) -> None:
    replica.wait_for(0)
    before = greedy(replica.url, PROMPTS)
    for _ in range(VERSIONS):
        trainer.step()
        trainer.publish()
        replica.wait_for(trainer.publisher.version)
    live = greedy(replica.url, PROMPTS)
    assert [tokens for tokens, _ in live] != [tokens for tokens, _ in before], "the syncs changed nothing"

    command = [sys.executable, "-m", "shared", "checkout", trainer.bucket.url, "--out", str(folder / "model")]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "fresh").mkdir()
    small = {"max_model_len": 512, "vllm_args": SMALL_CACHE}
    fresh = VllmServer(Settings(bucket="", run="", folder=str(folder / "fresh"), **small))
    try:
        fresh.start(folder / "model")
        assert greedy(fresh.url, PROMPTS) == live
    finally:
        fresh.stop()


def test_a_damaged_delta_is_named_and_not_applied(trainer, replica):
    serving = trainer.publisher.version
    replica.wait_for(serving)
    before = greedy(replica.url, PROMPTS)
    put = trainer.bucket.put
    damaged = trainer.writer.keys.delta(serving + 1, trainer.writer.epoch)

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
    assert greedy(replica.url, PROMPTS) == before

    trainer.bucket.put = put
    content = trainer.bucket.get(damaged)
    put(damaged, bytes([*content[:-1], content[-1] ^ 1]))
    status = replica.wait_for(serving + 1)
    assert status["digest"] == trainer.writer.newest.digest


def test_a_version_whose_weights_do_not_fit_is_undone(trainer, replica):
    """The files are as published, but the digest is not theirs: put back, reported, and still serving."""
    serving = trainer.publisher.version
    replica.wait_for(serving)
    before = greedy(replica.url, PROMPTS)
    commit = trainer.writer.commit
    trainer.writer.commit = lambda delta, anchor, **facts: commit(
        delta, anchor, **{**facts, "digest": "0" * 16}
    )
    trainer.step()
    trainer.publish()
    status = replica.wait_for_error("0" * 16)
    assert (status["version"], status["state"]) == (serving, "serving")
    assert greedy(replica.url, PROMPTS) == before

    trainer.writer.commit = commit
    trainer.step()
    trainer.publish()
    assert replica.wait_for(serving + 2)["digest"] == trainer.writer.newest.digest


def test_answers_name_their_version(trainer, replica):
    replica.wait_for(trainer.publisher.version)
    body = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 1}
    answer = httpx.post(f"{replica.url}/v1/completions", json=body, timeout=60.0)
    assert answer.headers["x-policy-version"] == str(trainer.publisher.version)
    assert answer.headers["x-policy-sync"] == str(trainer.syncs)


def test_chat_streams_through_the_gateway(replica):
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "stream": True,
    }
    with httpx.stream("POST", f"{replica.url}/v1/chat/completions", json=body, timeout=60.0) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200
    assert lines[-1] == "data: [DONE]"


CONTROL_PLANE = [
    "pause",
    "resume",
    "update_weights",
    "init_weight_transfer_engine",
    "collective_rpc",
    "sleep",
]
OTHERS = [
    "metrics",
    "weight_checker",
    "reset_prefix_cache",
    "server_info",
    "tokenize",
    "v1/load_lora_adapter",
]


@pytest.mark.parametrize("route", [*CONTROL_PLANE, *OTHERS])
def test_the_control_plane_is_closed(replica, route):
    """vLLM's development endpoints drive the weights; none is reachable from the public port."""
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{replica.url}/{route}", json={}, timeout=60.0)
        assert answer.status_code in (404, 405), f"{method} /{route}: {answer.status_code}"


def test_a_run_that_was_started_over_is_joined_afresh(trainer, replica):
    """The same run name, but another history: only the anchor leads there."""
    replica.wait_for(trainer.publisher.version)
    trainer.bucket.delete([info.key for info in trainer.bucket.list("runs/live/") if "/log/" not in info.key])
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(0.5)
    restarted = RunWriter(trainer.bucket, "live", model="tiny", assets=trainer.writer.assets)
    publisher = Publisher(restarted, trainer.log)
    publisher.publish(trainer.model.named_parameters(), 1)
    publisher.close()
    status = replica.wait_for(0)
    assert status["digest"] == restarted.newest.digest


def test_nothing_outlives_a_killed_gateway(replica):
    """Not even a vLLM that no longer listens to a request to end."""
    family = psutil.Process(replica.pid).children(recursive=True)
    server = next(process for process in family if "--served-model-name" in process.cmdline())
    server.suspend()
    replica.kill()
