"""Names and shapes of the checkpoint tensors of Qwen3 models."""

import math
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]


def qwen_shapes(
    layers: int = 28,
    vocabulary: int = 151936,
    hidden: int = 1024,
    heads: int = 2048,
    kv: int = 1024,
    inner: int = 3072,
) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensors of a Qwen3 with a tied head; the default sizes are those of Qwen3-0.6B.

    `heads` and `kv`: rows of the projections to queries and to keys; `inner`: of the MLP, 0 for none.
    """
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    layer = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    for number in range(layers):
        parts = {f"model.layers.{number}.{part}.weight": shape for part, shape in layer.items()}
        shapes |= {name: shape for name, shape in parts.items() if math.prod(shape)}
    return {**shapes, "model.norm.weight": (hidden,)}


def shapes_8b() -> Shapes:
    """Qwen3-8B."""
    return qwen_shapes(layers=36, hidden=4096, heads=4096, inner=12288) | {"lm_head.weight": (151936, 4096)}


def shapes_experts(layers: int = 48, experts: int = 128) -> Shapes:
    """Qwen3-30B-A3B: 128 experts in each layer, 18,867 tensors."""
    dense = qwen_shapes(layers=layers, hidden=2048, heads=4096, kv=512, inner=0)
    kinds = {"gate_proj": (768, 2048), "up_proj": (768, 2048), "down_proj": (2048, 768)}
    routed = {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight": shape
        for layer in range(layers)
        for expert in range(experts)
        for kind, shape in kinds.items()
    }
    routers = {f"model.layers.{layer}.mlp.gate.weight": (experts, 2048) for layer in range(layers)}
    return {**dense, **routed, **routers, "lm_head.weight": (151936, 2048)}
