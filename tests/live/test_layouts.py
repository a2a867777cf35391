"""Real vLLM loaders, one per layout: patching through routes is, bit for bit, loading the new checkpoint."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import ARCHITECTURES, write
from trainer.demo.processes import free_port

pytestmark = pytest.mark.live

# Mixtures of experts come first: vLLM sets their process group up only then.
# On one device: tensors in a single piece each; in several or turned ones; joined or reordered by the loader.
ALONE = ["deepseek_v2", "gemma3", "granite_moe", "gpt_oss", "glm4_moe", "bloom"]
# On two devices: both hold the norms, and the only key and value head of qwen3.
SHARED = ["qwen3_moe", "qwen3", "qwen2", "phi3", "gpt2", "falcon"]
FALLBACK = {"falcon": ["weight"], "bloom": ["bias", "weight"]}
EXPERTS = {"qwen3_moe": 2, "granite_moe": 2, "gpt_oss": 2, "glm4_moe": 1, "deepseek_v2": 1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for name in (*ALONE, *SHARED):
        write(ARCHITECTURES[name].config(), root / name)
    return root


def _examine(root: Path, names: list[str], ranks: int) -> dict[str, list[dict[str, Any]]]:
    """What tests.vllm.layouts finds, per model and rank."""
    logs = [root / f"rank{rank}of{ranks}.log" for rank in range(ranks)]
    arguments = [str(ranks), str(free_port()), *(str(root / name) for name in names)]
    children = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.vllm.layouts", str(rank), *arguments]
        with log.open("wb") as stderr:
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr))
    outputs = [child.communicate()[0].decode() for child in children]
    ended = [child.returncode for child in children]
    assert not any(ended), f"{ended}\n" + "\n".join(log.read_text()[-2000:] for log in logs)
    found = [[json.loads(line) for line in output.splitlines() if line[0] == "{"] for output in outputs]
    return {name: [facts for lines in found for facts in lines if facts["model"] == name] for name in names}


@pytest.fixture(scope="module")
def alone(checkpoints):
    return _examine(checkpoints, ALONE, 1)


@pytest.fixture(scope="module")
def shared(checkpoints):
    return _examine(checkpoints, SHARED, 2)


def _check(name: str, facts: dict[str, Any]) -> None:
    assert not facts["learning_wrote"]
    assert facts["digest_loaded"], "the digest of the live memory is that of the checkpoint"
    assert not facts["different"], "every bit of the runtime model is as a fresh load leaves it"
    assert facts["digest_patched"]
    assert not facts["not_undone"]
    assert not facts["unchanged"], "every parameter was changed"
    assert sorted({name.rpartition(".")[2] for name in facts["unroutable"]}) == FALLBACK.get(name, [])
    assert facts["experts"] == EXPERTS.get(name, 0)
    assert facts["experts_as_fresh"]
    assert not facts["experts_stale"]


@pytest.mark.parametrize("name", ALONE)
def test_a_patched_model_is_a_freshly_loaded_one(alone, name):
    (facts,) = alone[name]
    _check(name, facts)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.long
def test_so_are_the_ranks_of_a_tensor_parallel_one(shared, name):
    first, second = shared[name]
    for facts in (first, second):
        _check(name, facts)
