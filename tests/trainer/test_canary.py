"""The canary finds a replica that computes with something else than it says; an honest one in bf16 passes."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from delta_weight_sync.checkout import CheckpointFolder
from delta_weight_sync.reader import RunReader, open_run
from tests.support.http_server import Request, answering
from tests.support.published_run import write_run
from trainer import canary
from trainer.canary import LIMIT, compare, token_logprobs

VERSIONS = 3


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunReader, dict[int, Path]]:
    """A run of a few versions that differ plainly, and a checkout of each."""
    folder = tmp_path_factory.mktemp("run")
    write_run((folder / "bucket").as_uri(), folder / "base", VERSIONS, drift=0.05)
    reader = open_run(f"{(folder / 'bucket').as_uri()}#test")
    for version in range(VERSIONS):
        reader.checkout(reader.manifest(version), folder / str(version))
    return reader, {version: folder / str(version) for version in range(VERSIONS)}


class Replica:
    """Answers as a vLLM does, computed in bf16 from the weights that it was given."""

    before_answer: Callable[[], object] = staticmethod(lambda: None)

    def serve(self, version: int, folder: Path) -> None:
        """These weights, under this label."""
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        label = {"version": version, "term": 1, "sync": version}
        self.versions = json.dumps([{"weights": label, "tokens": [[0, 0, 1], [1, 0, 1]]}])

    def answer(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        self.before_answer()
        found = token_logprobs(self.model, torch.tensor(json.loads(request.body)["prompt"])).tolist()
        choices = [
            {"index": index, "text": "", "logprobs": {"tokens": [], "token_logprobs": [None, *row, -0.1]}}
            for index, row in reversed([*enumerate(found)])
        ]
        return 200, {"x-policy-versions": self.versions}, json.dumps({"choices": choices}).encode()


@pytest.fixture
def replica() -> Iterator[Replica]:
    replica = Replica()
    with answering(replica.answer) as replica.url:
        yield replica


@pytest.fixture
def compared(published, replica, tmp_path) -> Iterator[Callable[[], tuple[int, float]]]:
    with CheckpointFolder(published[0], tmp_path / "kept") as kept:
        yield lambda: compare(published[0], kept, replica.url)


def test_an_honest_replica_in_bf16_raises_no_alarm(compared, replica, published):
    for number, folder in published[1].items():
        replica.serve(number, folder)
        version, off = compared()
        assert version == number
        assert 0 < off < LIMIT / 5


@pytest.mark.parametrize("name", ["self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_a_wrong_tensor_under_a_right_label_is_found(compared, replica, published, name):
    replica.serve(2, published[1][2])
    with torch.no_grad():
        weight = replica.model.get_submodule(f"model.layers.0.{name}").weight
        weight.copy_(weight.roll(1, 0))
    assert compared()[1] > LIMIT


def test_an_answer_that_a_commit_came_into_is_asked_for_again(compared, replica, published):
    answers = [published[1][1], published[1][2]]
    replica.before_answer = lambda: replica.serve(2, answers.pop(0))
    version, off = compared()
    assert (version, off < LIMIT) == (2, True)
    assert not answers, "twice asked"


def test_the_command_names_each_replica_that_is_off_or_cannot_be_compared(
    replica, published, monkeypatch, capsys
):
    reader, folders = published
    replica.serve(2, folders[1])
    words = [f"{reader.bucket.url}#test", "http://127.0.0.1:9", "127.0.0.1:9", replica.url]
    monkeypatch.setattr(sys, "argv", ["canary", *words])
    with pytest.raises(SystemExit) as ended:
        canary.main()
    assert ended.value.code == 1
    gone, no_url, off = capsys.readouterr().out.splitlines()
    assert "cannot be compared" in gone
    assert "'127.0.0.1:9' is not the URL of a Space" in no_url
    assert "at version 2: heal or restart it" in off


def test_ctrl_c_and_a_wrong_bucket_end_the_command_without_a_traceback(published, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["canary", "nowhere#first", "http://127.0.0.1:9"])
    with pytest.raises(SystemExit, match=r"^canary: .*nowhere"):
        canary.main()
    monkeypatch.setattr(canary, "compare", mock.Mock(side_effect=KeyboardInterrupt))
    run = f"{published[0].bucket.url}#test"
    monkeypatch.setattr(sys, "argv", ["canary", run, "http://127.0.0.1:9", "--every", "60"])
    with pytest.raises(SystemExit) as ended:
        canary.main()
    assert ended.value.code == 130
