from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.layers.rope import DefaultRope, DynamicRope, LinearRope, Llama3Rope, YarnRope
from engine.models.registry import read_model_spec
from engine.models.spec import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    Gated,
    LayerSpec,
    ModelSpec,
    MoE,
    NormSpec,
)
from engine.models.tensor_names import TensorNames
from tests.factories.checkpoints import ARCHITECTURES, ROPES, write_checkpoint
from tests.factories.configurations import (
    GEMMA,
    LFM2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_5,
    read_configuration,
)

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
LFM2_VL = {
    "architectures": ["Lfm2VlForConditionalGeneration"],
    "text_config": {**LFM2, "tie_embedding": True},
}
LFM2_8B_A1B = {  # as Liquid AI has published it
    "architectures": ["Lfm2MoeForCausalLM"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_embedding": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
LFM2_1_2B = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_use_swiglu": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_pos_enc": True,
    "vocab_size": 65536,
}
QWEN3_5_0_8B = {  # as Qwen has published it, without the vision part
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": True,
}
NEOX = {**LLAMA, "architectures": ["GPTNeoXForCausalLM"]}


LFM2_ATTENTION = AttentionSpec(
    *(32, 8, 64),
    scale=64**-0.5,
    rope=DefaultRope(1e6),
    rotary_dim=64,
    qk_norm=NormSpec("rms", 1e-5),
)
LFM2_8B_LAYERS = tuple(
    LayerSpec(mixer, mlp, NormSpec("rms", 1e-5))
    for mixer, mlp in zip(
        (ConvSpec(2048, 3), ConvSpec(2048, 3), LFM2_ATTENTION, ConvSpec(2048, 3)),
        [Gated(7168)] * 2 + [MoE(32, 4, 1792, scores="sigmoid", chooses_by_bias=True)] * 2,
        strict=True,
    )
)
QWEN3_5_ATTENTION = AttentionSpec(
    *(8, 2, 256),
    scale=1 / 16,
    rope=DefaultRope(1e7),
    rotary_dim=64,
    qk_norm=NormSpec("rms", 1e-6, unit_offset=True),
    has_gate=True,
)


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
    ("fields", "state_mib", "kv_kib"),
    [
        (LFM2_1_2B, 10 * 3 * 2048 * 2 / 2**20, 12),
        (QWEN3_5_0_8B, 18 + 18 * 4 * 6144 * 2 / 2**20, 12),
    ],
    ids=["lfm2-1.2b", "qwen3.5-0.8b"],
)
def test_state_bytes_of_published_models_are_those_of_the_readme(
    fields: dict[str, Any], state_mib: float, kv_kib: int, tmp_path: Path
) -> None:
    spec = read_configuration(tmp_path, fields)
    assert spec.state_bytes(torch.bfloat16) == state_mib * 2**20
    assert spec.kv_bytes_per_token(torch.bfloat16) == kv_kib * 2**10
    assert len(set(spec.state_shapes)) == 1


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
        (LFM2, "first.mixer", ConvSpec(64, 3)),
        (LFM2, "first.norm", NormSpec("rms", 1e-5)),
        ({**LFM2, "conv_bias": True, "conv_L_cache": 4}, "first.mixer", ConvSpec(64, 4, bias=True)),
        (LFM2, "first.mlp", Gated(256)),
        ({**LFM2, "block_auto_adjust_ff_dim": False}, "first.mlp", Gated(128)),
        ({**LFM2, "block_ffn_dim_multiplier": None}, "first.mlp", Gated(85)),
        ({**LFM2, "block_ff_dim": 6656}, "first.mlp", Gated(4608)),
        ({**LFM2, "intermediate_size": 10752}, "first.mlp", Gated(7168)),
        (LFM2, "tie_word_embeddings", True),
        ({**LFM2, "tie_embedding": False}, "tie_word_embeddings", False),
        ({**LFM2_VL, "tie_embedding": False}, "tie_word_embeddings", False),
        ({**LFM2_VL, "tie_word_embeddings": False}, "tie_word_embeddings", False),
        (LFM2_VL, "tie_word_embeddings", True),
        ({**LFM2, "full_attn_idxs": None}, "state_shapes", ()),
        (LFM2_1_2B, "first.mlp", Gated(8192)),
        (LFM2_1_2B, "eos_token_ids", (7,)),
        (LFM2_1_2B, "attentions", (LFM2_ATTENTION,) * 6),
        (LFM2_8B_A1B, "first.mlp", Gated(7168)),
        (LFM2_8B_A1B, "layers", LFM2_8B_LAYERS),
        (LFM2_8B_A1B, "tie_word_embeddings", True),
        (QWEN3_5, "first.mixer", DeltaSpec(2, 4, 16, 24, kernel=4, norm_eps=1e-5)),
        ({**QWEN3_5, "output_gate_type": "swish"}, "first.mixer.gate", "silu"),
        ({**QWEN3_5, "output_gate_type": "sigmoid"}, "first.mixer.gate", "sigmoid"),
        (QWEN3_5, "first.norm", NormSpec("rms", 1e-5, unit_offset=True)),
        (QWEN3_5, "head_dim", 256),
        ({**QWEN3_5, "full_attention_interval": 1}, "state_shapes", ()),
        (QWEN3_5_0_8B, "tie_word_embeddings", True),
        (QWEN3_5_0_8B, "context_length", 262144),
        (QWEN3_5_0_8B, "attentions", (QWEN3_5_ATTENTION,) * 6),
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
