"""Real vLLM loaders, one per layout: patching through routes is, bit for bit, loading the new checkpoint."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from delta_weight_sync.checkpoint import WEIGHTS, read_bits, write_bits
from trainer.processes import free_port

pytestmark = pytest.mark.live

_SIZE = {
    "vocab_size": 250,  # no multiple of 64: vLLM pads it
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_GROUPED |= {"n_group": 1, "topk_group": 1, **_SPARSE}


def _configs() -> dict[str, PretrainedConfig]:
    """Name -> a tiny model. Mixtures of experts come first: vLLM sets their process group up only then."""
    t = transformers
    latent = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    small = {"vocab_size": 250, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    return {
        "qwen3_moe": t.Qwen3MoeConfig(**_SIZE, **_SPARSE, num_experts=4, head_dim=32),
        "granite_moe": t.GraniteMoeConfig(**_SIZE, num_local_experts=4, num_experts_per_tok=2),
        "gpt_oss": t.GptOssConfig(**_SIZE, num_local_experts=4, num_experts_per_tok=2, head_dim=32),
        "glm4_moe": t.Glm4MoeConfig(**_SIZE, **_GROUPED, head_dim=32, num_nextn_predict_layers=0),
        "deepseek_v2": t.DeepseekV2Config(
            **_SIZE, **_GROUPED, **latent, q_lora_rank=None, topk_method="greedy"
        ),
        "qwen3": t.Qwen3Config(**{**_SIZE, "num_key_value_heads": 1}, head_dim=32, tie_word_embeddings=True),
        "qwen2": t.Qwen2Config(**_SIZE, tie_word_embeddings=False),
        "gemma3": t.Gemma3TextConfig(**_SIZE, head_dim=32),
        "phi3": t.Phi3Config(**_SIZE),
        "gpt2": t.GPT2Config(vocab_size=250, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
        "falcon": t.FalconConfig(**small, bias=False),
        "bloom": t.BloomConfig(vocab_size=250, n_layer=2, n_head=4, hidden_size=64),
    }


# On one device: in a single piece each; in several or turned ones; joined or reordered by the loader.
WHOLE = ["qwen3_moe", "deepseek_v2", "gemma3"]
IN_PARTS = ["granite_moe", "gpt_oss", "glm4_moe", "phi3", "gpt2"]
FALLBACK = {"falcon": ["weight"], "bloom": ["bias", "weight"]}
# On two devices: both hold the norms, and the only key and value head of qwen3.
SHARED = ["qwen3_moe", "qwen3", "qwen2", "phi3", "gpt2", "falcon"]
EXPERTS = {"qwen3_moe": 2, "granite_moe": 2, "gpt_oss": 2, "glm4_moe": 1, "deepseek_v2": 1}


def _build(config: PretrainedConfig, folder: Path) -> None:
    """A random checkpoint, and another one that differs in a fifth of every tensor."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder / "base")
    shutil.copytree(folder / "base", folder / "patched", ignore=shutil.ignore_patterns("*.safetensors"))
    rng = np.random.default_rng(0)
    patched = {name: _moved(bits, rng) for name, bits in read_bits(folder / "base")}
    shapes = {name: bits.shape for name, bits in patched.items()}
    write_bits(shapes, patched.__getitem__, folder / "patched" / WEIGHTS)


def _moved(bits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A fifth of the elements, and at least one, a few ULPs larger: no NaN comes of it."""
    flat = bits.reshape(-1).copy()
    index = rng.permutation(flat.size)[: max(1, flat.size // 5)]
    flat[index] += rng.integers(1, 60, index.size).astype(np.uint16)
    return flat.reshape(bits.shape)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for name, config in _configs().items():
        _build(config, root / name)
    return root


def _examine(root: Path, names: list[str], ranks: int) -> dict[str, list[dict[str, Any]]]:
    """What tests.inference.layouts finds, per model and rank."""
    logs = [root / f"rank{rank}of{ranks}.log" for rank in range(ranks)]
    arguments = [str(ranks), str(free_port()), *(str(root / name) for name in names)]
    children = [_start([str(rank), *arguments], log) for rank, log in enumerate(logs)]
    outputs = [child.communicate()[0].decode() for child in children]
    assert not any(child.returncode for child in children), [log.read_text()[-500:] for log in logs]
    found = [[json.loads(line) for line in output.splitlines() if line[0] == "{"] for output in outputs]
    return {name: [facts for lines in found for facts in lines if facts["model"] == name] for name in names}


def _start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.inference.layouts", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as stderr:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment)


@pytest.fixture(scope="module")
def alone(checkpoints):
    return _examine(checkpoints, [*WHOLE, *IN_PARTS, *FALLBACK], 1)


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


@pytest.mark.parametrize("name", [*WHOLE, *IN_PARTS, *FALLBACK])
def test_a_patched_model_is_a_freshly_loaded_one(alone, name):
    (facts,) = alone[name]
    _check(name, facts)
    assert (facts["in_parts"] > 0) is (name in IN_PARTS)


@pytest.mark.parametrize("name", SHARED)
def test_so_are_the_ranks_of_a_tensor_parallel_one(shared, name):
    first, second = shared[name]
    for facts in (first, second):
        _check(name, facts)
        assert facts["in_parts"]
