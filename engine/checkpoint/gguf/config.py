"""The `config.json` that the metadata of a GGUF file stand for.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and those that llama.cpp's
`convert_hf_to_gguf.py` writes for each architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from engine.checkpoint.gguf.reader import GgufFile
from engine.errors import CheckpointError
from engine.fields import Fields

EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
_ATTENTION_BIAS, _MLP_BIAS = "blk.0.attn_q.bias", "blk.0.ffn_down.bias"
# Factors of the rotary frequencies: those of Llama 3.1, and LongRoPE's for short and long prompts.
_ROPE_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TEMPERATURE = "attention.temperature_scale"  # of queries that are scaled by their position
# What ends a sequence too, of an architecture whose files name only one.
_END_TEXTS = {"gpt-oss": ("<|return|>", "<|call|>")}


def make_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of a `config.json`.

    Raises:
        UnsupportedError: an architecture or a feature that is not read from GGUF files.
        CheckpointError: a field is missing or wrong.
    """
    fields = Fields(file.metadata, name=file.path.name)
    kind = fields.text("general.architecture")
    if kind not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise fields.unsupported(
            "general.architecture", f"{kind!r} is not supported; supported: {supported}"
        )
    if EMBEDDING not in file.tensors:
        raise fields.error(EMBEDDING, "is missing")
    own = _own_fields(file, kind)
    num_heads, hidden_size = own.integer("attention.head_count"), own.integer("embedding_length")
    head_dim = own.integer("attention.key_length", default=hidden_size // num_heads)
    if own.integer("attention.value_length", default=head_dim) != head_dim:
        raise own.unsupported(
            "attention.value_length", f"must equal attention.key_length ({head_dim})"
        )
    name, specific = _ARCHITECTURES[kind]
    if kind == "llama" and own.integer("expert_count", default=0, minimum=0) > 1:
        name, specific = "MixtralForCausalLM", _mixtral
    if kind == "mistral3" and _TEMPERATURE not in own:
        name, specific = "MistralForCausalLM", _without_windows
    return {
        "architectures": [name],
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": own.integer("block_count"),
        "intermediate_size": own.integer("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.integer("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": own.integer("context_length"),
        "rope_theta": own.number("rope.freq_base", default=1e4),
        "rope_scaling": _rope_scaling(file, own, kind),
        "dtype": "float32" if _is_exact(file) else "bfloat16",
        "tie_word_embeddings": _HEAD not in file.tensors,
        "attention_bias": _ATTENTION_BIAS in file.tensors,
        "mlp_bias": _MLP_BIAS in file.tensors,
        "eos_token_id": [*dict.fromkeys(_ends(fields, kind))],
        "quantization_config": {"quant_method": "gguf"},
        **specific(own, head_dim),
    }


def _is_exact(file: GgufFile) -> bool:
    return all(tensor.type_name == "F32" for tensor in file.tensors.values())


def _own_fields(file: GgufFile, architecture: str) -> Fields:
    """Return the fields of the architecture, without its name before theirs."""
    prefix = f"{architecture}."
    own = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    return Fields(own, name=f"{file.path.name}: {architecture}")


def _ends(fields: Fields, kind: str) -> Iterator[int]:
    """Yield the tokens that end a sequence."""
    for name in _END_TOKENS:
        token = fields.integer(f"tokenizer.ggml.{name}", default=None, minimum=0)
        if token is not None:
            yield token
    texts = _END_TEXTS.get(kind, ())
    tokens = (fields.texts("tokenizer.ggml.tokens") or []) if texts else []
    yield from (tokens.index(text) for text in texts if text in tokens)


def _rope_scaling(file: GgufFile, own: Fields, architecture: str) -> dict[str, Any] | None:
    length = own.integer("context_length")
    scaling: dict[str, Any] = {
        "original_max_position_embeddings": own.integer(
            "rope.scaling.original_context_length", default=length
        )
    }
    if _ROPE_FACTORS in file.tensors:
        factors = _floats(file, _ROPE_FACTORS)
        return scaling | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
    if _LONG_FACTORS in file.tensors:
        return scaling | {
            "rope_type": "longrope",
            "short_factor": _floats(file, _SHORT_FACTORS),
            "long_factor": _floats(file, _LONG_FACTORS),
            "attention_factor": own.number("rope.scaling.attn_factor", default=None),
        }
    # As in llama.cpp, a factor alone is linear; the files of 2023 have it under another name.
    own = own.over({"rope.scaling.factor": own.raw("rope.scale_linear")})
    usual = "linear" if "rope.scaling.factor" in own else "none"
    kind = own.text("rope.scaling.type", default=usual)
    if kind == "none":
        return None
    log_multiplier = own.number("rope.scaling.yarn_log_multiplier", default=None, or_zero=True)
    return scaling | {
        "rope_type": kind,
        "factor": own.number("rope.scaling.factor"),
        "beta_fast": own.number("rope.scaling.yarn_beta_fast", default=None),
        "beta_slow": own.number("rope.scaling.yarn_beta_slow", default=None),
        "mscale": 1.0 if log_multiplier else None,
        "mscale_all_dim": log_multiplier or None,
        "truncate": architecture != "gpt-oss",  # of which no file has it
        "llama_4_scaling_beta": own.number(_TEMPERATURE, default=None, or_zero=True),
    }


def _floats(file: GgufFile, name: str) -> list[float]:
    """Return the values of a small tensor of float32.

    Raises:
        CheckpointError: there is none, or it is of another type.
    """
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type_name != "F32":
        raise CheckpointError("must be an F32 tensor", param=f"{file.path.name}: {name}")
    values = np.fromfile(tensor.file, "<f4", math.prod(tensor.shape), offset=tensor.offset)
    return [float(value) for value in values]


def _nothing(_own: Fields, _head_dim: int) -> dict[str, Any]:
    return {}


def _gemma2(own: Fields, head_dim: int) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(own, head_dim, num_layers_27b=46),
        "sliding_window": own.integer("attention.sliding_window", default=4096),
        # The first files have neither field, and mean what all of Gemma 2 have.
        "attn_logit_softcapping": own.number("attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": own.number("final_logit_softcapping", default=30.0),
    }


def _gemma3(own: Fields, head_dim: int) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(own, head_dim, num_layers_27b=62),
        "sliding_window": own.integer("attention.sliding_window", default=1024),
        "rope_local_base_freq": own.number("rope.freq_base_swa", default=1e4),
    }


def _mixtral(own: Fields, _head_dim: int) -> dict[str, Any]:
    return {
        "num_local_experts": own.integer("expert_count"),
        "num_experts_per_tok": own.integer("expert_used_count"),
        "sliding_window": None,
    }


def _qwen_moe(own: Fields, _head_dim: int) -> dict[str, Any]:
    return {
        "num_experts": own.integer("expert_count"),
        "num_experts_per_tok": own.integer("expert_used_count"),
        "moe_intermediate_size": own.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen2_moe(own: Fields, head_dim: int) -> dict[str, Any]:
    shared = own.integer("expert_shared_feed_forward_length")
    others = {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}
    return _qwen_moe(own, head_dim) | others


def _gpt_oss(own: Fields, _head_dim: int) -> dict[str, Any]:
    return {
        "num_local_experts": own.integer("expert_count"),
        "num_experts_per_tok": own.integer("expert_used_count"),
        "intermediate_size": own.integer("expert_feed_forward_length"),
        "sliding_window": own.integer("attention.sliding_window"),
    }


def _without_windows(_own: Fields, _head_dim: int) -> dict[str, Any]:
    return {"sliding_window": None}


def _granite(own: Fields, head_dim: int) -> dict[str, Any]:
    return {
        "attention_multiplier": own.number("attention.scale", default=head_dim**-0.5),
        "embedding_multiplier": own.number("embedding_scale", default=1.0),
        "residual_multiplier": own.number("residual_scale", default=1.0),
        "logits_scaling": own.number("logit_scale", default=1.0),
    }


def _glm4(own: Fields, head_dim: int) -> dict[str, Any]:
    return {"partial_rotary_factor": own.integer("rope.dimension_count") / head_dim}


def _query_scalar(own: Fields, head_dim: int, *, num_layers_27b: int) -> int:
    """Return the scale of the queries. No field has it: the number of layers identifies the 27B."""
    if own.integer("block_count") == num_layers_27b:
        return own.integer("embedding_length") // own.integer("attention.head_count")
    return head_dim


def _phi3(own: Fields, head_dim: int) -> dict[str, Any]:
    rotated = own.integer("rope.dimension_count", default=head_dim)
    return {
        "partial_rotary_factor": rotated / head_dim,
        "sliding_window": own.integer("attention.sliding_window", default=0, minimum=0) or None,
    }


# llama.cpp's name of an architecture -> that of transformers, and the fields of its own.
_ARCHITECTURES: dict[str, tuple[str, Callable[[Fields, int], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _nothing),  # Mistral is one; with experts it is Mixtral
    "qwen2": ("Qwen2ForCausalLM", _nothing),
    "qwen2moe": ("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3": ("Qwen3ForCausalLM", _nothing),
    "qwen3moe": ("Qwen3MoeForCausalLM", _qwen_moe),
    "ernie4_5": ("Ernie4_5ForCausalLM", _nothing),
    "glm4": ("Glm4ForCausalLM", _glm4),
    "mistral3": ("Ministral3ForCausalLM", _without_windows),  # or what was before, without scaling
    "gpt-oss": ("GptOssForCausalLM", _gpt_oss),
    "granite": ("GraniteForCausalLM", _granite),
    "smollm3": ("SmolLM3ForCausalLM", _nothing),
    "gemma": ("GemmaForCausalLM", _nothing),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "phi3": ("Phi3ForCausalLM", _phi3),
}
