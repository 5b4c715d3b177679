import json
import math
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import CheckpointError, UnsupportedError
from engine.layers.rope import DefaultRope, DynamicRope, LinearRope, Llama3Rope, YarnRope
from engine.models.registry import read_model_spec
from engine.models.spec import AttentionSpec, Gated, LayerSpec, ModelSpec, NormSpec
from engine.models.tensor_names import TensorNames
from tests.factories.checkpoints import ARCHITECTURES, ROPES, write_checkpoint

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}


def _read(path: Path, fields: dict[str, Any] | str) -> ModelSpec:
    text = fields if isinstance(fields, str) else json.dumps(fields)
    (path / "config.json").write_text(text, encoding="utf-8")
    return read_model_spec(path)


def test_a_minimal_llama(tmp_path: Path) -> None:
    attention = AttentionSpec(8, 8, 8, scale=8**-0.5, rope=DefaultRope(10000.0), rotary_dim=8)
    layer = LayerSpec(attention, Gated(128, "silu"), NormSpec("rms", 1e-5), "pre")
    assert _read(tmp_path, LLAMA) == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=64,
        layers=(layer,) * 4,
        norm=NormSpec("rms", 1e-5),
        context_length=512,
        dtype="float32",
        tie_word_embeddings=False,
        eos_token_ids=(),
        tensor_names=TensorNames(),
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("rope", ROPES)
def test_what_transformers_writes(architecture: str, rope: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, rope=rope, dtype=torch.bfloat16, vocab_size=16)
    config = read_model_spec(tmp_path)
    assert config.architecture == architecture
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
    assert (config.vocab_size, config.head_dim, config.dtype) == (16, 16, "bfloat16")
    assert config.eos_token_ids == (2,)
    assert type(config.layers[0].attention.rope).__name__.lower() == f"{rope}rope"


def test_kv_bytes_per_token(tmp_path: Path) -> None:
    config = _read(tmp_path, {**QWEN3, "head_dim": 32})
    assert config.kv_bytes_per_token(torch.bfloat16) == 2 * 4 * 2 * 32 * 2
    assert config.kv_bytes_per_token(torch.float32) == 2 * 4 * 2 * 32 * 4
    assert config.kv_bytes_per_token(torch.float8_e4m3fn) == 2 * 4 * 2 * 32


@pytest.mark.parametrize(
    ("fields", "attribute", "expected"),
    [
        ({**LLAMA, "num_key_value_heads": None}, "num_kv_heads", 8),
        ({**LLAMA, "num_key_value_heads": 4.0}, "num_kv_heads", 4),
        (MISTRAL, "num_kv_heads", 8),
        ({**LLAMA, "head_dim": 24}, "head_dim", 24),
        ({**LLAMA, "head_dim": None}, "head_dim", 8),
        (QWEN2, "head_dim", 8),
        (QWEN3, "head_dim", 128),
        ({**LLAMA, "torch_dtype": "float16"}, "dtype", "float16"),
        ({**LLAMA, "torch_dtype": "float16", "dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({**LLAMA, "dtype": "torch.bfloat16"}, "dtype", "bfloat16"),
        ({**LLAMA, "eos_token_id": 7}, "eos_token_ids", (7,)),
        ({**LLAMA, "eos_token_id": [7, 0]}, "eos_token_ids", (7, 0)),
        ({**LLAMA, "eos_token_id": None}, "eos_token_ids", ()),
        ({**LLAMA, "tie_word_embeddings": True}, "tie_word_embeddings", True),
        ({**LLAMA, "attention_bias": True}, "first.attention.output_bias", True),
        ({**LLAMA, "attention_bias": True}, "first.attention.qkv_bias", True),
        ({**LLAMA, "mlp_bias": True}, "first.mlp.bias", True),
        (QWEN2, "first.attention.qkv_bias", True),
        (QWEN2, "first.attention.output_bias", False),
        (QWEN3, "first.attention.qkv_bias", False),
        ({**MISTRAL, "attention_bias": True}, "first.attention.qkv_bias", False),
        (MISTRAL, "sliding_windows", (4096,) * 4),
        ({**MISTRAL, "sliding_window": None}, "sliding_windows", (None,) * 4),
        ({**MISTRAL, "sliding_window": 5}, "sliding_windows", (5,) * 4),
        ({**QWEN2, "sliding_window": 5}, "sliding_windows", (None,) * 4),
        (
            {**QWEN2, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3},
            "sliding_windows",
            (None, None, None, 5),
        ),
        ({**QWEN2, "use_sliding_window": True}, "sliding_windows", (None,) * 4),
        (
            {**QWEN2, "use_sliding_window": True, "max_window_layers": 0},
            "sliding_windows",
            (4096,) * 4,
        ),
        (
            {
                **QWEN3,
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "sliding_windows",
            (5, None, 5, None),
        ),
        ({**QWEN3, "layer_types": ["sliding_attention"] * 4}, "sliding_windows", (None,) * 4),
        ({**LLAMA, "layer_types": ["full_attention"] * 4}, "sliding_windows", (None,) * 4),
        ({**LLAMA, "rope_theta": 5e5}, "first.attention.rope", DefaultRope(5e5)),
        ({**LLAMA, "rope_scaling": None}, "first.attention.rope", DefaultRope(10000.0)),
        (
            {**LLAMA, "rope_parameters": {"rope_theta": 7.0}},
            "first.attention.rope",
            DefaultRope(7.0),
        ),
        (
            {**LLAMA, "rope_theta": 3e4, "rope_scaling": {"type": "linear", "factor": 2}},
            "first.attention.rope",
            LinearRope(3e4, 2),
        ),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.5}},
            "first.attention.rope",
            DynamicRope(10000.0, 2.5, 512),
        ),
        (
            {
                **QWEN2,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            },
            "first.attention.rope",
            YarnRope(10000.0, 4.0, 128, None, 32.0, 1.0, None, None, True),
        ),
        (
            {
                **LLAMA,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            "first.attention.rope",
            Llama3Rope(10000.0, 8.0, 1.0, 4.0, 64),
        ),
        (LLAMA, "context_length", 512),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}, "context_length", 1024),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.5}}, "context_length", 1280),
        ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4}}, "context_length", 2048),
        (
            {
                **LLAMA,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 128,
                },
            },
            "context_length",
            512,
        ),
    ],
)
def test_quirks(fields: dict[str, Any], attribute: str, expected: Any, tmp_path: Path) -> None:
    spec = _read(tmp_path, fields)
    found = attrgetter(attribute.removeprefix("first."))
    assert found(spec.layers[0] if attribute.startswith("first.") else spec) == expected


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
    ],
)
def test_broken_configurations(fields: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        _read(tmp_path, fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**LLAMA, "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM .* LlamaForCausalLM"),
        ({**LLAMA, "architectures": []}, "architectures: none is not supported"),
        ({**LLAMA, "hidden_act": "relu2"}, "hidden_act: 'relu2'"),
        ({**QWEN2, "dual_chunk_attention_config": {}}, "dual_chunk_attention_config"),
        ({**LLAMA, "dtype": "float8_e4m3fn"}, "dtype: 'float8_e4m3fn'"),
        ({**LLAMA, "sliding_window": 8}, "sliding_window: is not supported for this"),
        ({**MISTRAL, "layer_types": ["full_attention"] * 4}, "layer_types: is not supported"),
        ({**LLAMA, "rope_scaling": {"type": "ntk"}}, "'ntk' .* supported: default"),
        ({**LLAMA, "rope_parameters": {"full_attention": {}}}, "rope per layer type"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_refused(fields: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        _read(tmp_path, fields)


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: not found in"):
        read_model_spec(tmp_path)
