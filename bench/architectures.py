"""Configurations of tiny models: attention and dense layers or experts (others: `bench.hybrids`).

What matters is how their tensors lie in vLLM, so each is as small as its loader allows: two layers, or as
many as it takes to have one of each kind.
"""

from collections.abc import Callable
from dataclasses import dataclass

import transformers as t
from transformers import PretrainedConfig

SIZE = {
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
UNTIED = {**SIZE, "tie_word_embeddings": False}
TIED = {**SIZE, "tie_word_embeddings": True}
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_GROUPED |= {"n_group": 1, "topk_group": 1, **SPARSE}
_LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
OLD = {"vocab_size": 250, "bos_token_id": 1, "eos_token_id": 2}
_GPT = {**OLD, "n_embd": 64, "n_layer": 2, "n_head": 4}


@dataclass(frozen=True)
class Architecture:
    """`kind` says what is particular about it; `config` makes its configuration."""

    kind: str
    config: Callable[[], PretrainedConfig]


DENSE = {
    "llama": Architecture("dense, own head", lambda: t.LlamaConfig(**UNTIED)),
    "mistral": Architecture("sliding window", lambda: t.MistralConfig(**UNTIED, sliding_window=32)),
    "qwen2": Architecture("biased qkv", lambda: t.Qwen2Config(**UNTIED)),
    "qwen3": Architecture(
        "qk-norm, tied head", lambda: t.Qwen3Config(**{**TIED, "num_key_value_heads": 1}, head_dim=32)
    ),
    "gemma2": Architecture("soft caps, every other layer local", lambda: t.Gemma2Config(**TIED, head_dim=32)),
    "gemma3": Architecture("qk-norm, mostly local layers", lambda: t.Gemma3TextConfig(**TIED, head_dim=32)),
    "phi3": Architecture("fused qkv and gate", lambda: t.Phi3Config(**UNTIED)),
    "gpt2": Architecture("transposed, biased, tied", lambda: t.GPT2Config(**_GPT)),
    "gptj": Architecture("parallel blocks", lambda: t.GPTJConfig(**_GPT, rotary_dim=8)),
    "gpt_bigcode": Architecture("one key head", lambda: t.GPTBigCodeConfig(**_GPT)),
    "gpt_neox": Architecture(
        "fused qkv by heads",
        lambda: t.GPTNeoXConfig(**{k: v for k, v in UNTIED.items() if k != "num_key_value_heads"}),
    ),
    "falcon": Architecture(
        "fused qkv by heads",
        lambda: t.FalconConfig(
            vocab_size=250, num_hidden_layers=2, num_attention_heads=4, hidden_size=64, bias=False
        ),
    ),
    "bloom": Architecture(
        "fused qkv by heads, ALiBi",
        lambda: t.BloomConfig(vocab_size=250, n_layer=2, n_head=4, hidden_size=64),
    ),
    "opt": Architecture(
        "learned positions",
        lambda: t.OPTConfig(**{**UNTIED, "word_embed_proj_dim": 64, "ffn_dim": 96}),
    ),
    "stablelm": Architecture("partial rotary", lambda: t.StableLmConfig(**UNTIED)),
    "cohere": Architecture("parallel blocks, tied", lambda: t.CohereConfig(**TIED)),
    "granite": Architecture("scaled residuals", lambda: t.GraniteConfig(**UNTIED)),
    "glm4": Architecture("four norms per layer", lambda: t.Glm4Config(**UNTIED, head_dim=16)),
    "exaone4": Architecture("norms after blocks", lambda: t.Exaone4Config(**UNTIED)),
    "nemotron": Architecture("norms of 1 + weight", lambda: t.NemotronConfig(**UNTIED)),
    "olmo2": Architecture("norms after blocks", lambda: t.Olmo2Config(**UNTIED)),
    "smollm3": Architecture("layers without rotary", lambda: t.SmolLM3Config(**TIED)),
    "starcoder2": Architecture("biased everywhere", lambda: t.Starcoder2Config(**TIED)),
}

EXPERTS = {
    "qwen2_moe": Architecture(
        "MoE with a shared expert",
        lambda: t.Qwen2MoeConfig(
            **UNTIED, **SPARSE, num_experts=4, shared_expert_intermediate_size=32, decoder_sparse_step=1
        ),
    ),
    "qwen3_moe": Architecture(
        "MoE, qk-norm", lambda: t.Qwen3MoeConfig(**UNTIED, **SPARSE, num_experts=4, head_dim=32)
    ),
    "mixtral": Architecture("MoE", lambda: t.MixtralConfig(**UNTIED, **LOCAL)),
    "olmoe": Architecture(
        "MoE, qk-norm", lambda: t.OlmoeConfig(**UNTIED, num_experts=4, num_experts_per_tok=2)
    ),
    "phimoe": Architecture("MoE, biased", lambda: t.PhimoeConfig(**UNTIED, **LOCAL)),
    "granite_moe": Architecture("MoE, stacked experts", lambda: t.GraniteMoeConfig(**UNTIED, **LOCAL)),
    "gpt_oss": Architecture(
        "MoE, stacked and interleaved experts, sinks", lambda: t.GptOssConfig(**UNTIED, **LOCAL, head_dim=32)
    ),
    "glm4_moe": Architecture(
        "MoE after a dense layer",
        lambda: t.Glm4MoeConfig(**UNTIED, **_GROUPED, head_dim=32, num_nextn_predict_layers=0),
    ),
    "ernie4_5_moe": Architecture(
        "MoE with shared experts",
        lambda: t.Ernie4_5_MoeConfig(**TIED, moe_num_experts=4, moe_k=2, moe_intermediate_size=32),
    ),
    "minimax_m2": Architecture(
        "MoE, qk-norm",
        lambda: t.MiniMaxM2Config(
            **UNTIED, **LOCAL, head_dim=32, rotary_dim=16, scoring_func="sigmoid", use_routing_bias=True
        ),
    ),
    "deepseek_v2": Architecture(
        "MLA, MoE",
        lambda: t.DeepseekV2Config(**UNTIED, **_GROUPED, **_LATENT, q_lora_rank=None, topk_method="greedy"),
    ),
    "deepseek_v3": Architecture(
        "MLA with compressed queries, MoE",
        lambda: t.DeepseekV3Config(**UNTIED, **_GROUPED, **_LATENT, q_lora_rank=32, topk_method="noaux_tc"),
    ),
    "glm4_moe_lite": Architecture(
        "MLA, MoE", lambda: t.Glm4MoeLiteConfig(**UNTIED, **_GROUPED, **_LATENT, q_lora_rank=32)
    ),
}
