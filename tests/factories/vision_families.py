"""Tiny configurations of models with a vision part, of which the text is served."""

from __future__ import annotations

from typing import Any

from tests.factories.checkpoints import OMIT

WINDOW = 9
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}
MOE = {**EXPERTS, "moe_intermediate_size": 32}
# Trained on few positions, so that queries grow within the tests' lengths.
MINISTRAL3 = {
    "model_type": "ministral3",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.6,
    },
}
QWEN3_5 = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
}
QWEN3_5_MOE = {**MOE, "intermediate_size": OMIT, "shared_expert_intermediate_size": 48}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_SECTIONS = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}
_INTERLEAVED = {**_SECTIONS, "mrope_section": [4, 4, 4], "mrope_interleaved": True}

VISION_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-vision": (
        "Gemma3ForConditionalGeneration",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "vision_config": _VISION},
    ),
    "lfm2-vl": (
        "Lfm2VlForConditionalGeneration",
        {
            "model_type": "lfm2",
            "head_dim": OMIT,
            "layer_types": ["conv", "full_attention", "conv"],
            "vision_config": {**_VISION, "model_type": "siglip2_vision_model", "num_patches": 16},
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {"model_type": "llama", "vision_config": {**_VISION, "model_type": "clip_vision_model"}},
    ),
    "llava-mistral": (
        "LlavaNextForConditionalGeneration",
        {
            "model_type": "mistral",
            "sliding_window": WINDOW,
            "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        },
    ),
    "llava-qwen2": (
        "LlavaForConditionalGeneration",
        {"model_type": "qwen2", "vision_config": {**_VISION, "model_type": "clip_vision_model"}},
    ),
    "mistral3-vision": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "vision_config": {**_VISION, "model_type": "pixtral"}},
    ),
    "ministral3-vision": (
        "Mistral3ForConditionalGeneration",
        {**MINISTRAL3, "vision_config": {**_VISION, "model_type": "pixtral"}},
    ),
    "qwen2-vl": (
        "Qwen2VLForConditionalGeneration",
        {"head_dim": OMIT, "rope_parameters": _SECTIONS, "vision_config": _QWEN_VISION},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"head_dim": OMIT, "rope_parameters": _SECTIONS, "vision_config": _QWEN_VISION},
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        {"head_dim": 24, "rope_parameters": _INTERLEAVED, "vision_config": _QWEN_VISION},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            **MOE,
            "moe_intermediate_size": 48,
            "rope_parameters": _SECTIONS,
            "vision_config": _QWEN_VISION,
        },
    ),
    "qwen3.5-vision": (
        "Qwen3_5ForConditionalGeneration",
        {**QWEN3_5, "vision_config": _QWEN_VISION},
    ),
    "qwen3.5-moe-vision": (
        "Qwen3_5MoeForConditionalGeneration",
        {**QWEN3_5, **QWEN3_5_MOE, "vision_config": _QWEN_VISION},
    ),
}
