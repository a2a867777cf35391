"""Every scheme by which vLLM quantizes while it loads: after any delta, each byte is as in a fresh load."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from delta_weight_sync.checkpoint import WEIGHTS
from tests.support.architectures import UNTIED
from tests.support.tiny import ARCHITECTURES
from trainer.demo.processes import free_port

pytestmark = pytest.mark.live

# All sizes are multiples of 128, the size of a block.
SIZE = {**UNTIED, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MODELS = {
    "experts": Qwen3MoeConfig(**SIZE, **SPARSE),
    "dense": Qwen3Config(**SIZE),
    "routed": ARCHITECTURES["glm4_moe"].config(),  # router and experts have one bias
    "mla": ARCHITECTURES["deepseek_v2"].config(),
    "reordered": ARCHITECTURES["falcon"].config(),
}
# Mixtures of experts come first: vLLM sets their process group up only then.
EXPERTS = [f"experts:fp8_per_{part}" for part in ("tensor", "channel", "block")]
EXPERTS += ["experts:mxfp8", "experts:int8_per_channel_weight_only", "routed:fp8_per_channel"]
EXPERTS += ["mla:fp8_per_channel:ignore"]
DENSE = [f"dense:{scheme}" for scheme in ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8")]
QUICK = ["experts:fp8_per_block", "routed:fp8_per_channel", "dense:fp8_per_tensor", "dense:mxfp8"]
SHARED = ["experts:fp8_per_block", "experts:mxfp8", "dense:fp8_per_block", "dense:mxfp8"]
REFUSED = {
    "mla:fp8_per_channel": "W_UV: vLLM computes it from other weights, so deltas would not update it; leave",
    "reordered:fp8_per_channel": "query_key_value.weight: vLLM's loader computes with it",
    "packed:": "is quantized (compressed-tensors), but this run publishes unquantized weights: start vLLM",
    "dense:fp8_per_channel:memory": "of weights in host memory, but only 1 KB are available: use a machine",
    "dense:fp8_per_channel:damaged": "qkv_proj.weight: quantizing the published weights again does not give",
    "dense:fp8_per_channel:hidden": "qkv_proj: vLLM keeps this layer's weights where they cannot be compared",
}
DISAGREE = {
    "experts:int8_per_channel_weight_only": "vLLM's workers agree on each scale while they load",
    "dense:fp8_per_channel": "use --quantization fp8_per_block, or one worker",
    "dense:fp8_per_tensor": "use --quantization fp8_per_block, or one worker",
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name, config in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(root / name)
    _pack(root / "dense", root / "packed")
    return root


def _pack(plain: Path, packed: Path) -> None:
    """Write a checkpoint in the format FP8_DYNAMIC of compressed-tensors."""
    config = json.loads((plain / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    activations = {**weights, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config["quantization_config"] = {
        **{"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]},
        **{"quantization_status": "compressed", "config_groups": {"group_0": group}},
    }
    state = {}
    for name, tensor in load_file(plain / WEIGHTS).items():
        state[name] = tensor
        if name.endswith("_proj.weight"):
            scale = (tensor.float().abs().amax(1, keepdim=True) / 448).clamp_min(1e-12)
            state[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            state[f"{name}_scale"] = scale
    packed.mkdir()
    (packed / "config.json").write_text(json.dumps(config))
    save_file(state, packed / WEIGHTS, metadata={"format": "pt"})


def _examine(root: Path, cases: list[str], ranks: int, deltas: int) -> dict[str, list[dict[str, Any]]]:
    """What tests.vllm.schemes finds, per case and rank."""
    logs = [root / f"rank{rank}of{ranks}.log" for rank in range(ranks)]
    arguments = [str(ranks), str(free_port()), str(deltas), str(root), *cases]
    children = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.vllm.schemes", str(rank), *arguments]
        with log.open("wb") as stderr:
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr))
    outputs = [child.communicate()[0].decode() for child in children]
    ended = [child.returncode for child in children]
    assert not any(ended), f"{ended}\n" + "\n".join(log.read_text()[-2000:] for log in logs)
    found = [[json.loads(line) for line in output.splitlines() if line[:1] == "{"] for output in outputs]
    return {case: [facts for lines in found for facts in lines if facts["case"] == case] for case in cases}


def _check(facts: dict[str, Any], deltas: int) -> None:
    assert facts["learned"], "the digest of the mirror and the live weights is that of the checkpoint"
    assert not facts["wrote"], "to learn writes nothing"
    assert not facts["unequal"], "every byte, and the second digest, are as after a fresh load"
    assert facts["loads"] == deltas // 10
    assert facts["not_undone"] == 0
    assert facts["learned_again"], "without the stage that was not committed"
    assert "something else changed the quantized weights" in facts["healed"]["refused"]
    assert facts["healed"]["repaired"]


@pytest.fixture(scope="module")
def alone(checkpoints: Path) -> dict[str, list[dict[str, Any]]]:
    return _examine(checkpoints, [*QUICK, *REFUSED], 1, 20)


@pytest.fixture(scope="module")
def shared(checkpoints: Path) -> dict[str, list[dict[str, Any]]]:
    return _examine(checkpoints, [*SHARED, *DISAGREE], 2, 20)


@pytest.mark.parametrize("case", QUICK)
def test_after_random_deltas_and_undos_each_byte_is_as_in_a_fresh_load(alone, case):
    (facts,) = alone[case]
    _check(facts, 20)
    assert facts["bytes"] > 0


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.long
def test_so_it_is_on_the_ranks_of_a_tensor_parallel_model(shared, case):
    first, second = shared[case]
    for facts in (first, second):
        _check(facts, 20)


@pytest.mark.long
@pytest.mark.parametrize("case", [*EXPERTS, *DENSE])
def test_so_it_is_after_200_deltas(checkpoints, case):
    (facts,) = _examine(checkpoints, [case], 1, 200)[case]
    _check(facts, 200)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_quantized_again_is_refused_with_the_way_out(alone, case):
    (facts,) = alone[case]
    assert REFUSED[case] in facts["refused"]
    assert facts["refused_again"] == facts["refused"], "when the follower tries again"


@pytest.mark.parametrize("case", DISAGREE)
@pytest.mark.long
def test_scales_on_which_workers_agree_are_refused(shared, case):
    for facts in shared[case]:
        assert DISAGREE[case] in facts["refused"]
