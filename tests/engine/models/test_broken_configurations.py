"""What is wrong in a `config.json`, or not served, is refused by the name of the field."""

import math
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError, UnsupportedError
from engine.models.registry import read_model_spec
from tests.factories.configurations import (
    GEMMA,
    LLAMA,
    LONGROPE,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    read_configuration,
)


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
    ],
)
def test_what_is_not_supported_is_refused(fields: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_configuration(tmp_path, fields)


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: not found in"):
        read_model_spec(tmp_path)
