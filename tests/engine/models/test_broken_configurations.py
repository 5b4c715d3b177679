"""What is wrong in a `config.json`, or not served, is refused by the name of the field."""

import math
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError, UnsupportedError
from engine.models.registry import read_model_spec
from tests.factories.configurations import (
    GEMMA,
    LFM2,
    LLAMA,
    LONGROPE,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3_5,
    read_configuration,
)

LFM2_MOE = {**LFM2, "architectures": ["Lfm2MoeForCausalLM"]}
QWEN3_5_MOE = {**QWEN3_5, "architectures": ["Qwen3_5MoeForCausalLM"]}


def _mistral3(model_type: str) -> dict[str, Any]:
    text = {**LLAMA, "model_type": model_type}
    return {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold one JSON object"),
        ({k: v for k, v in LLAMA.items() if k != "architectures"}, "architectures: is missing"),
        ({**LLAMA, "architectures": "Llama"}, "architectures: must be a list of strings"),
        *[
            ({k: v for k, v in LLAMA.items() if k != field}, f"{field}: is missing")
            for field in LLAMA
            if field != "architectures"
        ],
        ({**LLAMA, "vocab_size": "1000"}, 'vocab_size: must be an integer .*"1000"'),
        ({**LLAMA, "vocab_size": True}, "vocab_size: must be an integer"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers: must be .* at least 1"),
        ({**LLAMA, "rms_norm_eps": "small"}, "rms_norm_eps: must be a number"),
        ({**LLAMA, "rms_norm_eps": math.inf}, "rms_norm_eps: must be a finite number"),
        ({**LLAMA, "rms_norm_eps": math.nan}, "rms_norm_eps: must be a number above 0"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false"),
        ({**LLAMA, "eos_token_id": "</s>"}, "eos_token_id: must be an integer or a list"),
        ({**LLAMA, "eos_token_id": [1, None]}, "eos_token_id: must be"),
        ({**LLAMA, "eos_token_id": 1000}, "eos_token_id: must be below vocab_size 1000"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads: must divide"),
        ({**LLAMA, "hidden_size": 63}, "head_dim: is missing, and hidden_size"),
        ({**LLAMA, "head_dim": 7}, "head_dim: must be even"),
        ({**QWEN2, "layer_types": ["full_attention"]}, "layer_types: must give .* 4 layers"),
        ({**QWEN2, "layer_types": ["linear_attention"] * 4}, "layer_types: must give"),
        ({**LLAMA, "rope_scaling": "linear"}, "rope_scaling: must be an object"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "rope_scaling: factor: is missing"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0}}, "factor: must be a number"),
        ({**LLAMA, "rope_scaling": {"type": 3}}, "type: must be a string"),
        (
            {
                **LLAMA,
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 2,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                },
            },
            "high_freq_factor: must exceed low_freq_factor",
        ),
        ({**LLAMA, "dtype": 16}, "dtype: must be a string"),
        ({**LLAMA, "hidden_size": 10**12}, "hidden_size: must be an integer of at most 2147483647"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers: must be .* at most 4096"),
        ({**MIXTRAL, "num_local_experts": 10**6}, "num_local_experts: must be .* at most 4096"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "per_tok: must be at most num_local_experts 8"),
        ({**LLAMA, "rope_theta": 1}, r"rope_theta: must exceed 1 \(got 1\)"),
        ({**LLAMA, "rope_scaling": LONGROPE}, r"short_factor must have 4 factors.*\(got 3\)"),
        (
            {**LLAMA, "rope_scaling": LONGROPE, "original_max_position_embeddings": 1},
            "original_max_position_embeddings: must be an integer of at least 2",
        ),
        (
            {**LLAMA, "rope_scaling": {"type": "linear", "factor": 1e30}},
            "rope_scaling: factor: must be at most 1048576",
        ),
        ({**LFM2, "layer_types": ["conv"] * 3}, "layer_types: must give .* each of 4 layers"),
        (
            {**LFM2, "layer_types": ["conv", "full_attention", "mamba", "conv"]},
            "layer_types: must give one of conv, full_attention for",
        ),
        ({**LFM2, "full_attn_idxs": [1, 4]}, "full_attn_idxs: must be layers below .* 4"),
        ({**LFM2, "full_attn_idxs": [-1]}, "full_attn_idxs: must be layers below"),
        ({**LFM2, "conv_L_cache": 0}, "conv_L_cache: must be an integer of at least 1"),
        ({**LFM2, "conv_L_cache": -3}, "conv_L_cache: must be an integer of at least 1"),
        ({**LFM2, "conv_L_cache": 10**6}, "conv_L_cache: must be an integer of at most 256"),
        ({**LFM2, "norm_eps": -1}, "norm_eps: must be a number above 0"),
        ({**LFM2, "intermediate_size": 1}, "intermediate_size: must give from 1 .* .got 0."),
        ({**LFM2, "block_ff_dim": 0}, "block_ff_dim: must be an integer of at least 1"),
        ({**LFM2, "block_multiple_of": 0}, "block_multiple_of: must be an integer of at least 1"),
        ({**LFM2, "block_multiple_of": 10**12}, "block_multiple_of: must be .* at most"),
        ({**LFM2, "block_ffn_dim_multiplier": 1e300}, "intermediate_size: must give from 1 to"),
        ({**LFM2, "block_ffn_dim_multiplier": 0}, "block_ffn_dim_multiplier: must be a number"),
        ({**LFM2, "tie_embedding": "yes"}, "tie_embedding: must be true or false"),
        ({**LFM2_MOE, "num_dense_layers": -1}, "num_dense_layers: must be .* at least 0"),
        ({**LFM2_MOE, "num_experts": 2}, "num_experts_per_tok: must be at most num_experts 2"),
        (
            {**QWEN3_5, "layer_types": ["linear_attention", "conv"] * 2},
            "layer_types: must give one of linear_attention, full_attention for",
        ),
        ({**QWEN3_5, "full_attention_interval": 0}, "full_attention_interval: must be an integer"),
        ({**QWEN3_5, "linear_num_value_heads": 3}, r"must be a multiple of .* \(3 % 2 != 0\)"),
        ({**QWEN3_5, "linear_num_key_heads": 0}, "linear_num_key_heads: must be an integer"),
        ({**QWEN3_5, "linear_num_value_heads": 10**9}, "value_heads: must be .* at most 4096"),
        ({**QWEN3_5, "linear_key_head_dim": -8}, "linear_key_head_dim: must be an integer"),
        ({**QWEN3_5, "linear_value_head_dim": 2**30}, "value_head_dim: must be .* at most 1024"),
        ({**QWEN3_5, "linear_conv_kernel_dim": 2**30}, "conv_kernel_dim: must be .* at most 256"),
        ({**QWEN3_5, "partial_rotary_factor": 0.005}, "must give an even number of rotated"),
        ({**QWEN3_5_MOE, "num_experts": 4}, "num_experts_per_tok: must be at most num_experts 4"),
    ],
)
def test_broken_configurations(fields: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_configuration(tmp_path, fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**LLAMA, "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM .* LlamaForCausalLM"),
        ({**LLAMA, "architectures": []}, "architectures: none is not supported"),
        (
            _mistral3("mistral4"),
            "text_config: model_type: 'mistral4' is not supported; supported: ",
        ),
        ({**LLAMA, "hidden_act": "relu2"}, "hidden_act: 'relu2'"),
        ({**QWEN2, "dual_chunk_attention_config": {}}, "dual_chunk_attention_config"),
        ({**LLAMA, "dtype": "float8_e4m3fn"}, "dtype: 'float8_e4m3fn'"),
        ({**LLAMA, "sliding_window": 8}, "sliding_window: is not supported for this"),
        ({**MISTRAL, "layer_types": ["full_attention"] * 4}, "layer_types: is not supported"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 4}, "layer_types: is not supported"),
        ({**GEMMA, "layer_types": ["sliding_attention"] * 4}, "layer_types: is not supported"),
        ({**GEMMA, "hidden_act": "relu"}, "hidden_act: 'relu'"),
        ({**LLAMA, "rope_scaling": {"type": "ntk"}}, "'ntk' .* supported: default"),
        (
            {**LLAMA, "rope_parameters": {"full_attention": {}}},
            "full_attention: settings",
        ),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({**LFM2, "full_attn_idxs": []}, "layer_types: must have a layer with attention"),
        ({**LFM2, "layer_types": ["conv"] * 4}, "layer_types: must have a layer with attention"),
        ({**LFM2, "conv_dim": 32}, "conv_dim: 32 is not supported; only 64"),
        ({**LFM2, "block_use_swiglu": False}, "block_use_swiglu: false is not supported"),
        (
            {**QWEN3_5, "full_attention_interval": 5},
            "layer_types: must have a layer with attention",
        ),
        ({**QWEN3_5, "attn_output_gate": False}, "attn_output_gate: false is not supported"),
        ({**QWEN3_5, "output_gate_type": "tanh"}, "output_gate_type: 'tanh' .* silu, swish, sig"),
        ({**QWEN3_5, "hidden_act": "gelu"}, "hidden_act: is supported only if it is silu"),
        ({**QWEN3_5_MOE, "mlp_only_layers": [1]}, r"mlp_only_layers: \[1\] is not supported"),
        ({**QWEN3_5_MOE, "norm_topk_prob": False}, "norm_topk_prob: false is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(fields: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_configuration(tmp_path, fields)


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: not found in"):
        read_model_spec(tmp_path)
