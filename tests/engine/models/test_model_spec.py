from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.layers.rope import DefaultRope, DynamicRope, LinearRope, Llama3Rope, YarnRope
from engine.models.registry import read_model_spec
from engine.models.spec import AttentionSpec, Gated, LayerSpec, ModelSpec, NormSpec
from engine.models.tensor_names import TensorNames
from tests.factories.checkpoints import ARCHITECTURES, ROPES, write_checkpoint
from tests.factories.configurations import GEMMA, LLAMA, MISTRAL, QWEN2, QWEN3, read_configuration

CWM = {**LLAMA, "architectures": ["CwmForCausalLM"]}
EXAONE4 = {**LLAMA, "architectures": ["Exaone4ForCausalLM"], "num_key_value_heads": 2}
GRANITE4 = {
    **LLAMA,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["attention"] * 4,
    "num_local_experts": 0,
    "shared_intermediate_size": 128,
    "position_embedding_type": "rope",
}
LLAVA = {  # as LLaVA 1.5 says it
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064},
}
NEOX = {**LLAMA, "architectures": ["GPTNeoXForCausalLM"]}


def test_a_minimal_llama(tmp_path: Path) -> None:
    attention = AttentionSpec(8, 8, 8, scale=8**-0.5, rope=DefaultRope(10000.0), rotary_dim=8)
    layer = LayerSpec(attention, Gated(128, "silu"), NormSpec("rms", 1e-5), "pre")
    assert read_configuration(tmp_path, LLAMA) == ModelSpec(
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
    config = read_configuration(tmp_path, {**QWEN3, "head_dim": 32})
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
        ({**GEMMA, "hidden_act": "gelu"}, "first.mlp.activation", "gelu_tanh"),
        ({**GEMMA, "hidden_act": "silu"}, "first.mlp.activation", "silu"),
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
        (
            {
                **LLAMA,
                "architectures": ["Gemma3ForCausalLM"],
                "rope_theta": 9.0,
                "rope_local_base_freq": 7.0,
                "rope_parameters": {"sliding_attention": {"rope_type": "default"}},
            },
            "first.attention.rope",
            DefaultRope(7.0),
        ),
        (EXAONE4, "sliding_windows", (4096, 4096, 4096, None)),
        ({**EXAONE4, "sliding_window": None}, "sliding_windows", (None,) * 4),
        (
            {**EXAONE4, "sliding_window": 5, "sliding_window_pattern": "LG"},
            "sliding_windows",
            (5, None, 5, None),
        ),
        (GRANITE4, "first.attention.rope", DefaultRope(10000.0)),
        ({**GRANITE4, "position_embedding_type": "nope"}, "first.attention.rope", None),
        (GRANITE4, "first.mlp", Gated(128)),
        (LLAVA, "num_layers", 32),
        (LLAVA, "num_kv_heads", 32),
        (LLAVA, "vocab_size", 32064),
        ({**LLAVA, "text_config": {"model_type": "mistral"}}, "num_kv_heads", 8),
        (CWM, "sliding_windows", (None, 8192, 8192, 8192)),
        (CWM, "first.attention.rope", Llama3Rope(1e6, 16.0, 1.0, 4.0, 8192)),
        ({**NEOX, "rotary_emb_base": 5e5}, "first.attention.rope", DefaultRope(5e5)),
        (NEOX, "first.attention.rotary_dim", 2),
        ({**NEOX, "rotary_pct": 0.5}, "first.attention.rotary_dim", 4),
        (
            {**NEOX, "rope_parameters": {"partial_rotary_factor": 1.0}},
            "first.attention.rotary_dim",
            8,
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
    spec = read_configuration(tmp_path, fields)
    found = attrgetter(attribute.removeprefix("first."))
    assert found(spec.layers[0] if attribute.startswith("first.") else spec) == expected
