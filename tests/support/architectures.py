"""Configurations of tiny models: attention and dense layers or experts (others: `tests.support.hybrids`).

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
# A stack of experts that gate and move up is [experts, 192, 64]: one that is transposed has another shape.
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
GROUPED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
GROUPED |= {"n_group": 1, "topk_group": 1, **SPARSE}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
OLD = {"vocab_size": 250, "bos_token_id": 1, "eos_token_id": 2}
_NEAR = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_GPT = {**OLD, "n_embd": 64, "n_layer": 2, "n_head": 4}


@dataclass(frozen=True)
class Architecture:
    """What is said about an architecture, and how a tiny model of it is made.

    Attributes:
        kind: What is particular about it.
        config: Makes its configuration.
        transposed: Ends of the names of tensors that its checkpoints on the Hub have transposed. transformers
            loads them either way, but writes them as the model has them.
        drafts: Beginning of the names of a layer for drafts. Checkpoints on the Hub have it, but neither the
            trainer's model nor a model that vLLM serves.
    """

    kind: str
    config: Callable[[], PretrainedConfig]
    transposed: tuple[str, ...] = ()
    drafts: str = ""


DENSE = {
    "llama": Architecture("dense, own head", lambda: t.LlamaConfig(**UNTIED)),
    "mistral": Architecture("sliding window", lambda: t.MistralConfig(**UNTIED, sliding_window=32)),
    "qwen2": Architecture("biased qkv", lambda: t.Qwen2Config(**UNTIED)),
    "qwen3": Architecture(
        "qk-norm, tied head", lambda: t.Qwen3Config(**{**TIED, "num_key_value_heads": 1}, head_dim=32)
    ),
    "ministral3": Architecture(
        "interleaved rotary scaling", lambda: t.Ministral3Config(**UNTIED, head_dim=16)
    ),
    "gemma": Architecture("norms of 1 + weight, tied", lambda: t.GemmaConfig(**TIED, head_dim=16)),
    "gemma2": Architecture("soft caps, every other layer local", lambda: t.Gemma2Config(**TIED, head_dim=32)),
    "gemma3": Architecture("qk-norm, mostly local layers", lambda: t.Gemma3TextConfig(**TIED, head_dim=32)),
    "gemma3n": Architecture(
        "shared keys, embeddings per layer",
        lambda: t.Gemma3nTextConfig(
            **{**TIED, "num_hidden_layers": 4},
            head_dim=16,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=250,
            hidden_size_per_layer_input=16,
            laurel_rank=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            activation_sparsity_pattern=[0.0] * 4,
        ),
    ),
    "gemma4": Architecture(
        "embeddings per layer",
        lambda: t.Gemma4TextConfig(
            **TIED, head_dim=16, vocab_size_per_layer_input=250, hidden_size_per_layer_input=16
        ),
    ),
    "phi": Architecture("biased head", lambda: t.PhiConfig(**UNTIED)),
    "phi3": Architecture("fused qkv and gate, also Phi-4", lambda: t.Phi3Config(**UNTIED)),
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
    "cohere2": Architecture("parallel blocks, tied", lambda: t.Cohere2Config(**TIED, sliding_window=32)),
    "granite": Architecture("scaled residuals", lambda: t.GraniteConfig(**UNTIED)),
    "glm": Architecture("fused gate", lambda: t.GlmConfig(**UNTIED, head_dim=16)),
    "glm4": Architecture("four norms per layer", lambda: t.Glm4Config(**UNTIED, head_dim=16)),
    "exaone4": Architecture("norms after blocks", lambda: t.Exaone4Config(**UNTIED)),
    "nemotron": Architecture("norms of 1 + weight", lambda: t.NemotronConfig(**UNTIED)),
    "olmo2": Architecture("norms after blocks", lambda: t.Olmo2Config(**UNTIED)),
    "olmo3": Architecture("norms after blocks, local layers", lambda: t.Olmo3Config(**UNTIED)),
    "seed_oss": Architecture("biased qkv", lambda: t.SeedOssConfig(**UNTIED, head_dim=16)),
    "ernie4_5": Architecture("tied head", lambda: t.Ernie4_5Config(**TIED, head_dim=16)),
    "hunyuan_v1_dense": Architecture(
        "qk-norm, tied head", lambda: t.HunYuanDenseV1Config(**TIED, head_dim=16)
    ),
    "arcee": Architecture("no gate", lambda: t.ArceeConfig(**UNTIED)),
    "apertus": Architecture("parameters in the activation", lambda: t.ApertusConfig(**UNTIED, **_NEAR)),
    "minicpm3": Architecture("MLA", lambda: t.MiniCPM3Config(**UNTIED, **LATENT, q_lora_rank=32)),
    "helium": Architecture("dense", lambda: t.HeliumConfig(**UNTIED, head_dim=16)),
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
    # One layer, because vLLM needs long to build each.
    "phimoe": Architecture("MoE", lambda: t.PhimoeConfig(**{**UNTIED, "num_hidden_layers": 1}, **LOCAL)),
    "phimoe_biased": Architecture(
        "MoE, biased head, as Phi-3.5-MoE has it",
        lambda: t.PhimoeConfig(
            **{**UNTIED, "num_hidden_layers": 1}, **LOCAL, attention_bias=True, lm_head_bias=True
        ),
    ),
    "flex_olmo": Architecture(
        "MoE, qk-norm", lambda: t.FlexOlmoConfig(**UNTIED, num_experts=4, num_experts_per_tok=2)
    ),
    "granite_moe": Architecture("MoE, stacked experts", lambda: t.GraniteMoeConfig(**UNTIED, **LOCAL)),
    "granite_moe_shared": Architecture(
        "MoE with a shared expert",
        lambda: t.GraniteMoeSharedConfig(**UNTIED, **LOCAL, shared_intermediate_size=32),
    ),
    "llama4": Architecture(
        "MoE, transposed stacks of experts",
        lambda: t.Llama4TextConfig(
            **UNTIED,
            num_local_experts=4,
            num_experts_per_tok=1,
            intermediate_size_mlp=96,
            head_dim=16,
            interleave_moe_layer_step=2,
        ),
    ),
    "gpt_oss": Architecture(
        "MoE, stacked and interleaved experts, sinks", lambda: t.GptOssConfig(**UNTIED, **LOCAL, head_dim=32)
    ),
    "glm4_moe": Architecture(
        "MoE after a dense layer, float32 router bias",
        lambda: t.Glm4MoeConfig(**UNTIED, **GROUPED, head_dim=32, num_nextn_predict_layers=0),
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
        lambda: t.DeepseekV2Config(**UNTIED, **GROUPED, **LATENT, q_lora_rank=None, topk_method="greedy"),
    ),
    "deepseek_v3": Architecture(
        "MLA with compressed queries, MoE, float32 router bias, layer for drafts",
        lambda: t.DeepseekV3Config(
            **UNTIED,
            **GROUPED,
            **LATENT,
            q_lora_rank=32,
            topk_method="noaux_tc",
            num_nextn_predict_layers=1,
        ),
        drafts="model.layers.2.",
    ),
    "glm4_moe_lite": Architecture(
        "MLA, MoE, float32 router bias",
        lambda: t.Glm4MoeLiteConfig(**UNTIED, **GROUPED, **LATENT, q_lora_rank=32),
    ),
    "dots1": Architecture("MoE, qk-norm, float32 router bias", lambda: t.Dots1Config(**UNTIED, **GROUPED)),
    "exaone_moe": Architecture(
        "MoE, qk-norm, float32 router bias",
        lambda: t.ExaoneMoeConfig(
            **UNTIED,
            **SPARSE,
            num_experts=4,
            num_shared_experts=1,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            head_dim=16,
        ),
    ),
    "hunyuan_v1_moe": Architecture(
        "MoE with a shared expert",
        lambda: t.HunYuanMoEV1Config(**TIED, head_dim=16, num_experts=4, moe_topk=2),
    ),
    "afmoe": Architecture(
        "MoE with shared experts, gated attention",
        lambda: t.AfmoeConfig(
            **UNTIED,
            **SPARSE,
            num_experts=4,
            num_shared_experts=1,
            num_dense_layers=1,
            head_dim=16,
            **{"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
        ),
    ),
    "laguna": Architecture("MoE, router bias", lambda: t.LagunaConfig(**UNTIED, **SPARSE, num_experts=4)),
}
