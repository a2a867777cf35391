"""Tiny random models. Their parameters may have other names, shapes and dtypes than in a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.hybrids import DELTA_NET

SIZE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,  # heads of 32, which vLLM's kernels for CPUs take
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {  # sizes for which vLLM has a kernel
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
SIGHT = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "depth": 1, "patch_size": 4}

CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZE),
    "mixtral": lambda: transformers.MixtralConfig(**SIZE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZE, **EXPERTS, num_experts=4, head_dim=32),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZE, **EXPERTS, **GROUPS, **LATENT, n_routed_experts=8, q_lora_rank=None, topk_method="noaux_tc"
    ),
    "qwen2_5_vl": lambda: transformers.Qwen2_5_VLConfig(
        text_config={**SIZE, "rope_parameters": ROPE},
        vision_config={**SIGHT, "out_hidden_size": 128, "fullatt_block_indexes": [0]},
        tie_word_embeddings=False,
    ),
    "qwen3_5_vl": lambda: transformers.Qwen3_5Config(
        text_config={**SIZE, **DELTA_NET}, vision_config={**SIGHT, "out_hidden_size": 128}
    ),
    # The experts of its checkpoint are transposed stacks.
    "qwen3_vl_moe": lambda: transformers.Qwen3VLMoeConfig(
        text_config={**SIZE, **EXPERTS, "num_experts": 4, "head_dim": 32, "rope_parameters": ROPE},
        vision_config={**SIGHT, "out_hidden_size": 128, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=False,
    ),
    # Its checkpoint has one tensor for gate and up projection, the model has two.
    "hrm_text": lambda: transformers.HrmTextConfig(**SIZE),
}


def build(name: str, seed: int = 0) -> Any:
    """A model in bf16; a class may keep some tensors in float32, which get values that bf16 cannot hold."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    kinds = AutoModelForImageTextToText, AutoModelForCausalLM
    kind = next(kind for kind in kinds if type(config) in kind._model_mapping)
    model = kind.from_config(config).to(torch.bfloat16)
    for module in model.modules():
        if (bias := getattr(module, "e_score_correction_bias", None)) is not None:
            module.e_score_correction_bias = 8 + 0.05 * torch.rand(bias.shape)
    return model


def save(model: Any, folder: Path) -> Path:
    """Save the model as the base of a run."""
    model.save_pretrained(folder)
    return folder


def train(model: Any, steps: int, lr: float = 2e-3) -> None:
    """Train all parameters that are not frozen with AdamW, on tokens that are the same each time."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    tokens = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def loads_as(model: Any, folder: Path) -> list[str]:
    """Names of tensors that `from_pretrained` of a version loads with other bits than `model` has."""
    loaded = dict(type(model).from_pretrained(folder, dtype=torch.bfloat16).state_dict())
    return [name for name, tensor in model.state_dict().items() if not same_bits(tensor, loaded[name])]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)
