"""A commit happens between two steps: requests go on, prefixes are forgotten, every token has its version."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from inference_space.settings import Settings
from inference_space.vllm_server import VllmError, VllmServer
from tests.live.asking import Answer, Stream, ask, body
from tests.live.replica import SMALL_CACHE, Replica
from tests.live.test_replica import Trainer
from trainer.policies import tiny

pytestmark = pytest.mark.live

BLOCK = 32  # the smallest that vLLM's CPU kernels like; prefixes are shared in whole blocks
VLLM_ARGS = f"{SMALL_CACHE} --block-size {BLOCK} --enable-prompt-tokens-details"
PROMPT = [3 + 37 * i % 200 for i in range(2 * BLOCK)]
CONTEXT = 2048
LONG = 1600  # tokens; at a few milliseconds each, some commits fit in


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    tiny.build(folder, tie=True, seed=0)
    return folder


@pytest.fixture(scope="module")
def trainer(policy, tmp_path_factory):
    trainer = Trainer(tmp_path_factory.mktemp("bucket").as_uri(), policy)
    trainer.publish()
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def replica(trainer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replica")
    replica = Replica(trainer.bucket.url, "live", folder, max_model_len=CONTEXT)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("REPLICA_VLLM_ARGS", VLLM_ARGS)
        replica.start()
    try:
        replica.wait_for(0)
        yield replica
    finally:
        replica.stop()


def update(trainer: Trainer, replica: Replica) -> int:
    """One step of the trainer; returns the version when the replica serves it."""
    trainer.step()
    trainer.publish()
    replica.wait_for(trainer.publisher.version)
    return trainer.publisher.version


def test_every_request_in_flight_finishes_through_a_stream_of_commits(trainer, replica):
    first = trainer.publisher.version
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, replica.url, [*PROMPT, i], LONG) for i in range(16)]
        while not all(future.done() for future in asked):
            update(trainer, replica)
        answers = [future.result() for future in asked]
    for answer in answers:
        versions = [int(version) for version, _, _ in answer.spans]
        assert len(answer.tokens) == LONG
        assert [start for _, start, _ in answer.spans] == [0, *(end for _, _, end in answer.spans[:-1])]
        assert answer.spans[-1][2] == LONG
        assert versions == sorted(set(versions))
        assert answer.headers["x-policy-version"] == str(versions[0])
        assert answer.headers["x-policy-sync"] == str(versions[0] + 1), "what `Trainer.publish` counts"
    assert max(len(answer.spans) for answer in answers) > 2
    commits = replica.status(after=first)["commits"]
    assert not any(commit["joined"] for commit in commits)
    assert all(commit["commit_ms"] <= commit["pause_ms"] for commit in commits)


def test_a_prefix_never_outlives_its_weights(trainer, replica, tmp_path):
    """New requests follow a running one whose blocks stand on old keys and values; a fresh server agrees."""
    overtaken = 0
    while not (chase := follow_a_running_request(trainer, replica)).beside:
        overtaken += 1
        assert overtaken < 5, "the request was always done before its first followers were"
    again = [ask(replica.url, prompt, 24) for prompt in chase.prompts]
    with fresh_server(trainer, tmp_path) as fresh:
        expected = [ask(fresh.url, prompt, 1) for prompt in chase.prompts]
        expected_again = [ask(fresh.url, prompt, 24) for prompt in chase.prompts]

    found = [answer.cached for answer in chase.answers]
    assert found == [0, *((len(prompt) - 1) // BLOCK * BLOCK for prompt in chase.prompts[:-1])]
    assert [a.cached for a in chase.answers + again] == [a.cached for a in expected + expected_again]
    assert [a.tokens for a in chase.answers + again] == [a.tokens for a in expected + expected_again]
    assert [a.logprobs for a in chase.answers + again] == [a.logprobs for a in expected + expected_again]


@dataclass(frozen=True)
class Chase:
    prompts: list[list[int]]
    answers: list[Answer]  # one token each
    beside: bool  # some prompts ended in blocks filled after the commit, while their filler still ran


def follow_a_running_request(trainer: Trainer, replica: Replica) -> Chase:
    """Prompts that begin like a request which runs through a commit, each some blocks longer than the last.

    The first should find nothing, although all of it was cached before the commit; each later one what the
    one before it computed, and nothing of the running request, although from the commit on that one has
    filled blocks with the very tokens that are asked for.
    """
    ask(replica.url, PROMPT, 1)
    assert ask(replica.url, PROMPT, 1).cached > 0
    stream = Stream(replica.url, PROMPT, LONG)
    stream.first(BLOCK)
    update(trainer, replica)
    at_commit, beside = len(stream.tokens), False
    prompts, answers = [], []
    for length in range(4 * BLOCK, LONG - BLOCK, 4 * BLOCK):
        prompts.append([*PROMPT, *stream.first(length + 1)])
        answers.append(ask(replica.url, prompts[-1], 1))
        beside |= stream.running and length > at_commit
    stream.join()
    return Chase(prompts, answers, beside)


@contextmanager
def fresh_server(trainer: Trainer, folder: Path) -> Iterator[VllmServer]:
    """A vLLM that loads a checkout of the newest version."""
    command = [sys.executable, "-m", "shared", "checkout", trainer.bucket.url, "--out", str(folder / "model")]
    subprocess.run(command, check=True, capture_output=True)
    settings = Settings(bucket="", run="", folder=str(folder), max_model_len=CONTEXT, vllm_args=VLLM_ARGS)
    server = VllmServer(settings)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")  # as the replica: another number adds up in another order
        try:
            server.start(folder / "model")
            yield server
        finally:
            server.stop()


def test_each_token_has_the_version_that_made_it(trainer, replica):
    """Logprobs change with the weights: up to the end of the first span they are the old ones, then not."""
    for _ in range(5):
        version = trainer.publisher.version
        ask(replica.url, PROMPT, 1)
        old = ask(replica.url, PROMPT, LONG)
        assert old.spans == [(str(version), 0, LONG)]
        new = ask_through_a_commit(trainer, replica)
        if len(new.spans) > 1:
            break
    (first, start, end), *later = new.spans
    assert (first, start, [name for name, _, _ in later]) == (str(version), 0, [str(version + 1)])
    assert new.logprobs[:end] == old.logprobs[:end]
    assert new.logprobs[end] != old.logprobs[end]


def ask_through_a_commit(trainer: Trainer, replica: Replica) -> Answer:
    """A request that was sent before a commit; on a slow machine it may begin or end on one side of it."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, replica.url, PROMPT, LONG)
        update(trainer, replica)
        return asked.result()


def test_steps_that_were_under_way_keep_the_old_version(policy, tmp_path):
    """As above at every possible moment, with a scheduler that runs one step ahead, as it does on a GPU."""
    environment = {
        **os.environ,
        **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "delta_weight_sync"},
        **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    }
    command = [sys.executable, "-m", "tests.live.async_steps", str(policy)]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=log, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    undisturbed = {line["prompt"]: line["logprobs"] for line in lines if line["commit_after"] is None}
    disturbed = [line for line in lines if line["commit_after"] is not None]
    assert all(line["under_way"] == 1 for line in disturbed)
    assert len({line["spans"][0][2] for line in disturbed}) > 5
    for line in disturbed:
        (first, _, end), (second, start, _) = line["spans"]
        expected = undisturbed[line["prompt"]]
        changed = [a != b for a, b in zip(line["logprobs"], expected, strict=True)]
        assert (first, second, start) == ("old", "new", end)
        assert changed.index(True) == end


def test_a_commit_that_fails_changes_nothing(trainer, replica):
    """Versions, cached prefixes and the running request are as if it had not been tried; the next works."""
    version = trainer.publisher.version
    ask(replica.url, PROMPT, 1)
    undisturbed = ask(replica.url, PROMPT, LONG)
    commit = trainer.writer.commit
    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as fault:
        fault.setattr(
            trainer.writer, "commit", lambda *args, **facts: commit(*args, **{**facts, "digest": "0" * 16})
        )
        asked = pool.submit(ask, replica.url, PROMPT, LONG)
        trainer.step()
        trainer.publish()
        replica.wait_for_error("0" * 16)
        answer = asked.result()
    assert answer.spans == [(str(version), 0, LONG)]
    assert (answer.tokens, answer.logprobs) == (undisturbed.tokens, undisturbed.logprobs)
    computed = len(PROMPT) + LONG - 1  # the last token is sampled, but never fed
    assert ask(replica.url, [*PROMPT, *answer.tokens], 1).cached == computed // BLOCK * BLOCK

    assert update(trainer, replica) == version + 2
    assert ask(replica.url, PROMPT, 4).spans == [(str(version + 2), 0, 4)]
    (event,) = replica.status(after=version)["commits"]
    assert not event["joined"]


def test_every_choice_of_every_kind_of_answer_has_its_spans(trainer, replica):
    version = str(trainer.publisher.version)
    chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    chat |= {"ignore_eos": True}
    with httpx.Client(base_url=replica.url, timeout=120.0) as client:
        two_of_two = {**body([PROMPT, PROMPT[:9]], 3), "n": 2, "temperature": 1}
        answer = client.post("/v1/completions", json=two_of_two)
        assert len(answer.json()["choices"]) == 4
        assert answer.headers["x-policy-versions"] == ";".join([f"{version}:0-3"] * 4)
        answer = client.post("/v1/chat/completions", json=chat)
        assert answer.headers["x-policy-versions"] == f"{version}:0-5"
        with client.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as stream:
            assert stream.headers["x-policy-version"] == version
            assert "x-policy-versions" not in stream.headers, "not known before the last token"
            stream.read()
        assert client.get("/v1/models").headers["x-policy-version"] == version


def test_a_vllm_that_keeps_prefixes_elsewhere_is_refused(policy, tmp_path):
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    connector |= {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")}}
    arguments = f"--kv-transfer-config '{json.dumps(connector)}'"
    arguments = f"{SMALL_CACHE} {arguments}"
    settings = Settings(bucket="", run="", folder=str(tmp_path), max_model_len=CONTEXT, vllm_args=arguments)
    server = VllmServer(settings)
    try:
        server.start(policy)
        with pytest.raises(VllmError, match="drop --kv-transfer-config"):
            server.init_engine({})
    finally:
        server.stop()
