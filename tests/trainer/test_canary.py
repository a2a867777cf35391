"""A replica that computes with something else than it says is found; an honest one in bf16 is not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from delta_weight_sync import Publisher
from delta_weight_sync.checkout import CheckpointFolder
from delta_weight_sync.reader import RunReader, open_run
from delta_weight_sync.runlog import CanaryEvent, RunLogReader, RunLogWriter
from delta_weight_sync.store import open_bucket
from examples import tiny_policy as tiny
from tests.support.http_server import Request, answering
from trainer import canary
from trainer.canary import LIMIT, TOKENS, Canary, Reference, prompts_of, token_logprobs
from trainer.tasks import brevity, wordle

NEVER_S = 1e6
RUN, VERSIONS = "run", 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny.build(folder, tie=True, seed=0)
    return folder


@pytest.fixture(scope="module")
def published(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunReader, dict[int, Path]]:
    """A run of a few versions that differ plainly, and a checkout of each."""
    url, folder = tmp_path_factory.mktemp("bucket").as_uri(), tmp_path_factory.mktemp("versions")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with Publisher(f"{url}#{RUN}", base) as publisher, torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for _ in range(VERSIONS):
            publisher.publish(model.named_parameters())
            publisher.flush()
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
    reader = open_run(f"{url}#{RUN}")
    for version in range(VERSIONS):
        reader.checkout(reader.find(version), folder / str(version))
    return reader, {version: folder / str(version) for version in range(VERSIONS)}


@pytest.fixture(scope="module")
def prompts(base: Path) -> list[list[int]]:
    return prompts_of(brevity.make_dataset(), AutoTokenizer.from_pretrained(base))


class Replica:
    """Answers as a vLLM does, computed in bf16 from the weights that it was given."""

    url: str

    def __init__(self) -> None:
        self.before_answer: Callable[[], object] = lambda: None

    def serve(self, version: int, folder: Path) -> None:
        """These weights, under this label."""
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.spans = f"{version}:0-1;{version}:0-1"

    @torch.inference_mode()
    def answer(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        self.before_answer()
        found = token_logprobs(self.model, torch.tensor(json.loads(request.body)["prompt"])).tolist()
        choices = [
            {"index": index, "text": "", "logprobs": {"tokens": [], "token_logprobs": [None, *row, -0.1]}}
            for index, row in reversed([*enumerate(found)])
        ]
        return 200, {"x-policy-versions": self.spans}, json.dumps({"choices": choices}).encode()


@pytest.fixture
def replica() -> Iterator[Replica]:
    replica = Replica()
    with answering(replica.answer) as replica.url:
        yield replica


class Scene:
    """A canary that compares on request, and the events that it logged."""

    def __init__(self, urls: list[str], prompts: list[list[int]], base: Path, reader: RunReader, at: Path):
        self._kept = CheckpointFolder(reader, at / "kept")
        self.reference = Reference(str(base), reader, self._kept.__enter__(), prompts)
        bucket = open_bucket((at / "log").as_uri(), create=True)
        self._log, self._reader = RunLogWriter(bucket, RUN), RunLogReader(bucket, RUN)
        names = dict(zip(urls, ("one", "two"), strict=False))
        self.canary = Canary(urls, prompts, self.reference.logprobs, self._log, names.__getitem__, NEVER_S)

    def compare(self) -> list[CanaryEvent]:
        self.canary.compare()
        self._log.flush()
        return [event for event in self._reader.poll() if isinstance(event, CanaryEvent)]

    def close(self) -> None:
        self.canary.close()
        self._log.close()
        self._kept.__exit__(None, None, None)


@pytest.fixture
def scene(replica, prompts, base, published, tmp_path) -> Iterator[Scene]:
    scene = Scene([replica.url], prompts, base, published[0], tmp_path)
    yield scene
    scene.close()


def test_what_a_version_should_answer_is_what_its_checkout_computes(scene, prompts, published):
    for version, folder in published[1].items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            assert torch.equal(
                scene.reference.logprobs(version), token_logprobs(model, torch.tensor(prompts))
            )


def test_an_honest_replica_in_bf16_raises_no_alarm(scene, replica, published):
    for version, folder in published[1].items():
        replica.serve(version, folder)
        (event,) = scene.compare()
        assert (event.replica, event.version, event.alarm) == ("one", version, False)
        assert 0 < event.difference < LIMIT / 5


@pytest.mark.parametrize("name", ["self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_a_wrong_tensor_under_a_right_label_is_found_by_the_next_comparison(
    scene, replica, published, caplog, name
):
    replica.serve(1, published[1][1])
    assert not scene.compare()[0].alarm
    replica.serve(2, published[1][2])
    with torch.no_grad():
        weight = replica.model.get_submodule(f"model.layers.0.{name}").weight
        weight.copy_(weight.roll(1, 0))
    (event,) = scene.compare()
    assert (event.version, event.alarm) == (2, True)
    assert "one says that it serves version 2, but its logprobs are off by" in caplog.text


def test_weights_of_an_older_version_under_a_new_label_are_found(scene, replica, published):
    replica.serve(2, published[1][1])
    assert scene.compare()[0].alarm


def test_an_answer_that_a_commit_came_into_is_asked_for_again(scene, replica, published):
    answers = [published[1][1], published[1][2]]
    replica.before_answer = lambda: replica.serve(2, answers.pop(0))
    assert [(event.version, event.alarm) for event in scene.compare()] == [(2, False)]
    assert not answers, "twice asked"


def test_what_cannot_be_compared_now_is_left_to_the_next_comparison(scene, replica, published):
    replica.serve(1, published[1][1])
    for spans in ("1:0-1;2:0-1", "default:0-1"):
        replica.spans = spans
        assert scene.compare() == []
    replica.serve(99, published[1][1])
    assert scene.compare() == [], "no version of this run"
    replica.serve(1, published[1][1])
    assert len(scene.compare()) == 1


def test_a_model_that_is_not_the_runs_is_said_once(published, prompts, tmp_path, replica, caplog):
    tiny.build(tmp_path / "other", tie=False, seed=0)
    scene = Scene([replica.url], prompts, tmp_path / "other", published[0], tmp_path)
    try:
        replica.serve(1, published[1][1])
        assert scene.compare() == scene.compare() == []
    finally:
        scene.close()
    assert caplog.text.count("lm_head.weight is not published: this model is not that of the run") == 1


def test_one_that_is_gone_or_behind_keeps_nobody_from_being_compared(
    prompts, base, published, tmp_path, replica
):
    scene = Scene(["http://127.0.0.1:9", replica.url], prompts, base, published[0], tmp_path)
    try:
        replica.serve(2, published[1][2])
        assert [event.replica for event in scene.compare()] == ["two"]
        replica.serve(1, published[1][1])
        assert scene.compare() == [], "an older version would cost an anchor each time"
    finally:
        scene.close()


def test_comparisons_take_a_twentieth_of_the_time_at_most(scene, monkeypatch):
    clock, costs = [0.0], [0.1, 3.0, 0.1]

    def compare() -> None:
        clock[0] += costs.pop(0)

    monkeypatch.setattr(canary.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(scene.canary, "compare", compare)
    waits: list[float] = []

    class Closed(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0)
            return not costs

    monkeypatch.setattr(scene.canary, "_closed", Closed())
    monkeypatch.setattr(scene.canary, "_every_s", 10.0)
    scene.canary._loop()
    assert waits == pytest.approx([10.0, 10.0, 60.0, 10.0])


def test_prompts_are_the_tasks_own_and_of_one_length(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert [len(ids) for ids in prompts_of(brevity.make_dataset(), tokenizer)] == [TOKENS] * 4
    (one,) = prompts_of(wordle.make_dataset("Play Wordle.", 8, 0), tokenizer)
    assert "Play Wordle." in tokenizer.decode(one)
