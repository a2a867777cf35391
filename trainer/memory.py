"""The GPU memory that a trainer needs, computed from its settings before it loads the model."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_TILE = 4096, 32768  # TRL computes logits in tiles of at most this many tokens and vocabulary entries
# These optimizers have two moments per weight. For all other optimizers, no moments are counted.
_ADAMW = "adamw_torch_fused", "adamw_torch"
ESTIMATED = ("autocast", "activations", "logits")  # the other parts are exact with AdamW


def parts(model: str, options: Mapping[str, Any], shards: int = 1) -> dict[str, int]:
    """Bytes on the GPU of each rank, by purpose. Empty if `model` has no readable config of a language model.

    `options`: the settings; missing ones have the trainer's defaults. `shards`: number of FSDP's ranks.
    """
    try:
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            count = -(-AutoModelForCausalLM.from_config(config).num_parameters() // shards)
    except (OSError, ValueError):
        return {}
    text = config.get_text_config()
    size = 4 if options.get("dtype", "float32") == "float32" else 2
    bf16 = size == 2 or options.get("bf16", True)
    tokens = options.get("token_budget") or options.get("max_completion_length", 2048)
    # Estimated bytes of a layer's activations. With checkpointing, each layer keeps only its input, `kept`.
    layer = tokens * (2 if bf16 else 4) * (8 * text.hidden_size + 4 * text.intermediate_size)
    kept = size * tokens * text.hidden_size
    layers = text.num_hidden_layers
    checkpointing = options.get("gradient_checkpointing", True)
    needs = {
        "weights": size * count,
        "gradient": size * count,
        "moments": 2 * size * count * (options.get("optim", _ADAMW[0]) in _ADAMW),
        # bf16 copies of the `count` weights that a rank publishes, and of its blocks of other ranks' tensors.
        "mirror": 2 * count * (2 - 1 / shards) * (options.get("mirror") == "device"),
        "old policy": size * count * bool(options.get("exact_old_policy")),
        "autocast": 2 * count * (bf16 and size == 4),
        "activations": layer + layers * kept if checkpointing else layers * layer,
        "logits": 16 * min(tokens, _TILE[0]) * min(text.vocab_size, _TILE[1]),
    }
    return {name: int(need) for name, need in needs.items() if need}


def problem(needs: Mapping[str, int], room: int) -> str:
    """Why the exact parts do not fit into `room` bytes: a sentence with the fix, or "" if they fit."""
    if sum(need for name, need in needs.items() if name not in ESTIMATED) <= room:
        return ""
    lacking = f"training needs {words(needs)}, but there are {room / 1e9:.0f} GB here"
    fix = "--mirror host, or " * ("mirror" in needs) + "no --exact_old_policy, or " * ("old policy" in needs)
    fix += "use a larger GPU, a smaller --model, or more GPUs"
    return f"{lacking}: {fix} with `accelerate launch --use_fsdp --fsdp_version 2`"


def words(needs: Mapping[str, int]) -> str:
    """The sum and each part as text, in GB."""
    each = ", ".join(f"{name} {need / 1e9:.1f}" for name, need in needs.items())
    return f"{sum(needs.values()) / 1e9:.0f} GB ({each})"
