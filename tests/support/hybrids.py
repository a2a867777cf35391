"""Configurations of tiny models with state spaces, and of such as see, of which the text tower is served."""

import transformers as t

from tests.support.architectures import GROUPED, LOCAL, OLD, SPARSE, TIED, UNTIED, Architecture

_MAMBA = {**OLD, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
_SIGHT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "patch_size": 4,
    "image_size": 16,
}
_QWEN_SIGHT = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "depth": 2, "patch_size": 4}
_HALF_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [1, 1, 2],
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

_CLIP = {**_SIGHT, "num_hidden_layers": 2, "model_type": "clip_vision_model"}
_SIGLIP = {**_SIGHT, "num_hidden_layers": 2, "model_type": "siglip_vision_model"}
DELTA_NET = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_DELTA_MOE = {**UNTIED, **DELTA_NET, **SPARSE, "num_experts": 4, "shared_expert_intermediate_size": 32}
_SEEN = "vision-language, text only"

STATES = {
    "mamba": Architecture("state space", lambda: t.MambaConfig(**_MAMBA)),
    "mamba2": Architecture(
        "state space",
        # vLLM's CPU kernel needs this size of the state.
        lambda: t.Mamba2Config(**{**_MAMBA, "state_size": 16}, num_heads=4, head_dim=32, n_groups=1),
    ),
    "falcon_mamba": Architecture("state space", lambda: t.FalconMambaConfig(**_MAMBA)),
    "falcon_h1": Architecture(
        "attention and state space side by side", lambda: t.FalconH1Config(**UNTIED, **_MAMBA2)
    ),
    "jamba": Architecture(
        "hybrid, MoE",
        lambda: t.JambaConfig(
            **UNTIED,
            num_experts=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=8,
        ),
    ),
    "zamba2": Architecture(
        "hybrid, shared attention",
        lambda: t.Zamba2Config(
            **{**TIED, "num_key_value_heads": 4},
            layers_block_type=["mamba", "hybrid"],
            mamba_d_state=16,
            n_mamba_heads=4,
            mamba_headdim=32,
            adapter_rank=8,
            num_mem_blocks=1,
        ),
    ),
    "granite_moe_hybrid": Architecture(
        "hybrid, MoE",
        lambda: t.GraniteMoeHybridConfig(
            **UNTIED,
            **LOCAL,
            shared_intermediate_size=32,
            layer_types=["mamba", "attention"],
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_d_state=16,
        ),
    ),
    "nemotron_h": Architecture(
        "hybrid",
        lambda: t.NemotronHConfig(
            **{**UNTIED, "num_hidden_layers": 3},
            layers_block_type=["mamba", "attention", "mlp"],
            head_dim=16,
            mamba_num_heads=4,
            mamba_head_dim=32,
            n_groups=1,
            ssm_state_size=16,
        ),
    ),
    "qwen3_next": Architecture(
        "gated delta net, attention, MoE, layer for drafts",
        lambda: t.Qwen3NextConfig(**_DELTA_MOE),
        drafts="mtp.",
    ),
    "qwen3_5": Architecture("gated delta net, attention", lambda: t.Qwen3_5TextConfig(**UNTIED, **DELTA_NET)),
    "qwen3_5_moe": Architecture(
        "gated delta net, attention, MoE",
        lambda: t.Qwen3_5MoeTextConfig(**_DELTA_MOE),
    ),
    "lfm2": Architecture(
        "short convolutions, attention",
        lambda: t.Lfm2Config(
            **TIED,
            layer_types=["conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
            conv_dim=64,
            block_dim=64,
        ),
    ),
    "lfm2_moe": Architecture(
        "short convolutions, attention, MoE",
        lambda: t.Lfm2MoeConfig(
            **TIED,
            **SPARSE,
            num_experts=4,
            num_dense_layers=1,
            layer_types=["conv", "full_attention"],
        ),
    ),
}

SIGHT = {
    "qwen2_5_vl": Architecture(
        _SEEN,
        lambda: t.Qwen2_5_VLConfig(
            text_config={**UNTIED, "rope_parameters": _ROPE},
            vision_config={**_QWEN_SIGHT, "out_hidden_size": 64},
        ),
    ),
    "qwen3_vl": Architecture(
        _SEEN,
        lambda: t.Qwen3VLConfig(
            text_config={**UNTIED, "head_dim": 16, "rope_parameters": _ROPE},
            vision_config={**_QWEN_SIGHT, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        ),
    ),
    "gemma3_vl": Architecture(
        _SEEN,
        lambda: t.Gemma3Config(
            text_config={**TIED, "head_dim": 32},
            vision_config={**_SIGHT, "num_hidden_layers": 2},
            mm_tokens_per_image=4,
        ),
    ),
    "llava": Architecture(
        _SEEN,
        lambda: t.LlavaConfig(
            text_config={**UNTIED, "model_type": "llama"},
            vision_config={**_SIGHT, "num_hidden_layers": 2, "model_type": "clip_vision_model"},
        ),
    ),
    "qwen2_vl": Architecture(
        _SEEN,
        lambda: t.Qwen2VLConfig(
            text_config={**UNTIED, "rope_parameters": _ROPE},
            vision_config={
                **{"embed_dim": 64, "hidden_size": 64, "num_heads": 4, "depth": 2},
                **{"patch_size": 4, "mlp_ratio": 2},
            },
        ),
    ),
    "qwen3_vl_moe": Architecture(
        f"{_SEEN}, MoE",
        lambda: t.Qwen3VLMoeConfig(
            text_config={
                **UNTIED,
                **SPARSE,
                **{"head_dim": 16, "num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True},
                "rope_parameters": _ROPE,
            },
            vision_config={**_QWEN_SIGHT, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        ),
        transposed=("experts.gate_up_proj", "experts.down_proj"),
    ),
    "qwen3_5_vl": Architecture(
        f"{_SEEN}, gated delta net, layer for drafts",
        lambda: t.Qwen3_5Config(
            text_config={**UNTIED, **DELTA_NET}, vision_config={**_QWEN_SIGHT, "out_hidden_size": 64}
        ),
        drafts="mtp.",
    ),
    "qwen3_5_vl_moe": Architecture(
        f"{_SEEN}, gated delta net, MoE",
        lambda: t.Qwen3_5MoeConfig(
            text_config=_DELTA_MOE, vision_config={**_QWEN_SIGHT, "out_hidden_size": 64}
        ),
    ),
    "glm4v": Architecture(
        _SEEN,
        lambda: t.Glm4vConfig(
            text_config={**UNTIED, "rope_parameters": _HALF_ROPE},
            vision_config={**_QWEN_SIGHT, "out_hidden_size": 64, "image_size": 16},
        ),
    ),
    "glm4v_moe": Architecture(
        f"{_SEEN}, MoE, float32 router bias",
        lambda: t.Glm4vMoeConfig(
            text_config={
                **UNTIED,
                **GROUPED,
                **{"head_dim": 16, "use_qk_norm": False, "rope_parameters": _HALF_ROPE},
            },
            vision_config={**_QWEN_SIGHT, "out_hidden_size": 64, "image_size": 16},
        ),
    ),
    "gemma4_vl": Architecture(
        _SEEN,
        lambda: t.Gemma4Config(
            text_config={
                **TIED,
                **{"head_dim": 16, "vocab_size_per_layer_input": 250, "hidden_size_per_layer_input": 16},
            },
            vision_config={
                **_SIGHT,
                **{"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 16},
                "position_embedding_size": 64,
            },
        ),
    ),
    "llama4_vl": Architecture(
        f"{_SEEN}, MoE",
        lambda: t.Llama4Config(
            text_config={
                **UNTIED,
                **{"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
                **{"head_dim": 16, "intermediate_size_mlp": 96},
            },
            vision_config={
                **{**_SIGHT, "intermediate_size": 256, "num_hidden_layers": 2},
                **{"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
            },
        ),
    ),
    "mistral3": Architecture(
        _SEEN,
        lambda: t.Mistral3Config(
            text_config={**UNTIED, "model_type": "mistral", "head_dim": 16},
            vision_config={**_SIGHT, "num_hidden_layers": 2, "model_type": "pixtral"},
        ),
    ),
    "internvl": Architecture(
        _SEEN,
        lambda: t.InternVLConfig(
            text_config={**UNTIED, "model_type": "qwen2"},
            vision_config={
                **{**_SIGHT, "num_hidden_layers": 2, "patch_size": [4, 4], "image_size": [16, 16]}
            },
        ),
    ),
    "llava_next": Architecture(
        _SEEN,
        lambda: t.LlavaNextConfig(text_config={**UNTIED, "model_type": "llama"}, vision_config=_CLIP),
    ),
    "llava_onevision": Architecture(
        _SEEN,
        lambda: t.LlavaOnevisionConfig(text_config={**UNTIED, "model_type": "qwen2"}, vision_config=_SIGLIP),
    ),
    "idefics3": Architecture(
        _SEEN,
        lambda: t.Idefics3Config(
            text_config={**UNTIED, "model_type": "llama"},
            vision_config={**_SIGHT, "num_hidden_layers": 2},
            scale_factor=2,
        ),
    ),
    "paligemma": Architecture(
        _SEEN,
        lambda: t.PaliGemmaConfig(
            text_config={**TIED, "model_type": "gemma", "head_dim": 16},
            vision_config={**_SIGLIP, "projection_dim": 64},
            projection_dim=64,
            hidden_size=64,
        ),
    ),
    "lfm2_vl": Architecture(
        f"{_SEEN}, short convolutions",
        lambda: t.Lfm2VlConfig(
            text_config={
                **{**TIED, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
                **{"block_auto_adjust_ff_dim": False, "conv_dim": 64, "block_dim": 64},
            },
            vision_config={**_SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 16},
        ),
    ),
    "aria": Architecture(
        f"{_SEEN}, MoE",
        lambda: t.AriaConfig(
            text_config={
                **{**UNTIED, "model_type": "aria_text", "moe_num_experts": 4},
                **{"moe_topk": 2, "moe_num_shared_experts": 1},
            },
            vision_config={**_SIGHT, "num_hidden_layers": 2, "model_type": "idefics3_vision"},
        ),
    ),
}
