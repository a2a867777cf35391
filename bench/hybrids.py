"""Configurations of tiny models with state spaces, and of such as see, of which the text tower is served."""

import transformers as t

from bench.architectures import LOCAL, OLD, SPARSE, TIED, UNTIED, Architecture

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
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

STATES = {
    "mamba": Architecture("state space", lambda: t.MambaConfig(**_MAMBA)),
    "mamba2": Architecture(
        "state space", lambda: t.Mamba2Config(**_MAMBA, num_heads=4, head_dim=32, n_groups=1)
    ),
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
        "gated delta net, attention, MoE",
        lambda: t.Qwen3NextConfig(
            **UNTIED,
            **SPARSE,
            num_experts=4,
            shared_expert_intermediate_size=32,
            head_dim=32,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
    ),
    "qwen3_5": Architecture(
        "gated delta net, attention",
        lambda: t.Qwen3_5TextConfig(
            **UNTIED,
            head_dim=32,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
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
}

SIGHT = {
    "qwen2_5_vl": Architecture(
        "vision-language, text only",
        lambda: t.Qwen2_5_VLConfig(
            text_config={**UNTIED, "rope_parameters": _ROPE},
            vision_config={**_QWEN_SIGHT, "out_hidden_size": 64},
        ),
    ),
    "qwen3_vl": Architecture(
        "vision-language, text only",
        lambda: t.Qwen3VLConfig(
            text_config={**UNTIED, "head_dim": 16, "rope_parameters": _ROPE},
            vision_config={**_QWEN_SIGHT, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        ),
    ),
    "gemma3_vl": Architecture(
        "vision-language, text only",
        lambda: t.Gemma3Config(
            text_config={**TIED, "head_dim": 32},
            vision_config={**_SIGHT, "num_hidden_layers": 2},
            mm_tokens_per_image=4,
        ),
    ),
    "llava": Architecture(
        "vision-language, text only",
        lambda: t.LlavaConfig(
            text_config={**UNTIED, "model_type": "llama"},
            vision_config={**_SIGHT, "num_hidden_layers": 2, "model_type": "clip_vision_model"},
        ),
    ),
}
