"""A tiny configuration of every family, with all that sets it apart."""

from __future__ import annotations

from typing import Any

from tests.factories.checkpoints import OMIT
from tests.factories.vision_families import (
    EXPERTS,
    MINISTRAL3,
    MOE,
    QWEN3_5,
    QWEN3_5_MOE,
    VISION_FAMILIES,
    WINDOW,
)

_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 1.5, 4.0, 16.0],
    "original_max_position_embeddings": 96,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
_GPT2 = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": 100,
    "n_positions": 128,
    "head_dim": OMIT,
    "num_key_value_heads": OMIT,
}
_LFM2 = {
    "num_hidden_layers": 5,
    "head_dim": OMIT,
    "norm_eps": 1e-4,
    "conv_L_cache": 3,
    "conv_bias": True,
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.22,
    "logits_scaling": 1.7,
}
_GRANITE_MOE = {
    **_GRANITE,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
}
_GRANITE_HYBRID = {
    **_GRANITE_MOE,
    "head_dim": OMIT,
    "layer_types": ["full_attention"] * 3,
    "shared_intermediate_size": 96,
}

_MAMBA = {
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 16,
}

# Name of a case -> architecture, and what its configuration sets beside what all have.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("CohereForCausalLM", {"head_dim": OMIT, "logit_scale": 0.4, "layer_norm_eps": 1e-4}),
    "cohere2": (
        "Cohere2ForCausalLM",
        {
            "head_dim": OMIT,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ernie": ("Ernie4_5ForCausalLM", {"use_bias": True}),
    "ernie-moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            "num_hidden_layers": 5,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 2,
            "moe_layer_interval": 2,
            "head_dim": OMIT,
        },
    ),
    "arcee": ("ArceeForCausalLM", {}),
    "cwm": ("CwmForCausalLM", {"sliding_window": WINDOW}),
    "exaone4": ("Exaone4ForCausalLM", {"sliding_window": WINDOW, "sliding_window_pattern": 3}),
    "exaone4-without-windows": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "falcon": ("FalconForCausalLM", {"head_dim": OMIT, "ffn_hidden_size": 96}),
    "falcon-sequential-biases": (
        "FalconForCausalLM",
        {"head_dim": OMIT, "parallel_attn": False, "bias": True},
    ),
    "gemma": ("GemmaForCausalLM", {"head_dim": 24}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            # Low, so that they bend what they cap.
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0},
            },
        },
    ),
    "glm": ("GlmForCausalLM", {"attention_bias": True}),
    "glm4": ("Glm4ForCausalLM", {"attention_bias": False}),
    "glm-moe": (
        "Glm4MoeForCausalLM",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt2-untied": ("GPT2LMHeadModel", {**_GPT2, "tie_word_embeddings": False}),
    "gpt-neox": (
        "GPTNeoXForCausalLM",
        {"head_dim": OMIT, "num_key_value_heads": OMIT, "intermediate_size": 112},
    ),
    "gpt-neox-sequential": (
        "GPTNeoXForCausalLM",
        {
            "head_dim": OMIT,
            "num_key_value_heads": OMIT,
            "use_parallel_residual": False,
            "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 1.0},
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": WINDOW,
            "swiglu_limit": 0.7,  # low, so that it clamps
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "granite": ("GraniteForCausalLM", _GRANITE),
    "granite-moe": ("GraniteMoeForCausalLM", _GRANITE_MOE),
    "granite-moe-shared": (
        "GraniteMoeSharedForCausalLM",
        {**_GRANITE_MOE, "shared_intermediate_size": 48},
    ),
    "granite-moe-hybrid": (
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE_HYBRID, "num_local_experts": 5, "shared_intermediate_size": 48},
    ),
    "granite4-mamba": (
        "GraniteMoeHybridForCausalLM",
        {
            **_GRANITE_HYBRID,
            **_MAMBA,
            "num_local_experts": 5,
            "shared_intermediate_size": 48,
            "layer_types": ["mamba", "attention", "mamba"],
        },
    ),
    "bamba": ("BambaForCausalLM", {**_MAMBA, "mamba_proj_bias": True, "attn_layer_indices": [1]}),
    "granite4": (
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE_HYBRID, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        # Two thirds of 96 are 64, 1.6 times those 102, and the next multiple of 16 is 112.
        {**_LFM2, "block_ffn_dim_multiplier": 1.6, "block_multiple_of": 16},
    ),
    "lfm2-moe": (
        "Lfm2MoeForCausalLM",
        {
            **_LFM2,
            "conv_L_cache": 4,
            "conv_bias": False,
            "num_dense_layers": 2,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.7,
        },
    ),
    "lfm2-moe-without-bias": (
        "Lfm2MoeForCausalLM",
        {
            **_LFM2,
            "num_dense_layers": 0,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
    ),
    "llama": ("LlamaForCausalLM", {}),
    "ministral": (
        "MinistralForCausalLM",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": ("Ministral3ForCausalLM", MINISTRAL3),
    "mistral": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "nemotron": ("NemotronForCausalLM", {"norm_eps": 1e-4}),
    "olmo": ("OlmoForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 100.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {**EXPERTS, "head_dim": OMIT}),
    "olmoe-normalised": ("OlmoeForCausalLM", {**EXPERTS, "norm_topk_prob": True}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 96, "head_dim": OMIT, "num_key_value_heads": OMIT}),
    "phi": ("PhiForCausalLM", {}),
    "phi3-fused": ("Phi3ForCausalLM", {"sliding_window": 30}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 96},
    ),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {**MOE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**MOE, "norm_topk_prob": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3.5": ("Qwen3_5ForCausalLM", {**QWEN3_5, "attention_bias": True}),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        {**QWEN3_5, **MOE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", {**QWEN3_5, **QWEN3_5_MOE}),
    "seed-oss": ("SeedOssForCausalLM", {"attention_out_bias": True, "head_dim": 24}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1]}),
    "stablelm": ("StableLmForCausalLM", {"use_qkv_bias": True}),
    "stablelm-parallel": ("StableLmForCausalLM", {"use_parallel_residual": True}),
    "starcoder2": ("Starcoder2ForCausalLM", {"head_dim": OMIT, "sliding_window": WINDOW}),
    **VISION_FAMILIES,
}
