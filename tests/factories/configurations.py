"""Minimal `config.json`s of some families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.models.registry import read_model_spec
from engine.models.spec import ModelSpec

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
GEMMA = {**LLAMA, "architectures": ["GemmaForCausalLM"], "num_key_value_heads": 2}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2}
LONGROPE = {"type": "longrope", "short_factor": [1, 2, 3], "long_factor": [1, 2, 3, 4]}
LFM2 = {
    **LLAMA,
    "architectures": ["Lfm2ForCausalLM"],
    "full_attn_idxs": [1, 3],
}
QWEN3_5 = {
    **LLAMA,
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}


def read_configuration(path: Path, fields: dict[str, Any] | str) -> ModelSpec:
    """Write `fields` as the `config.json` of folder `path`, and read it."""
    text = fields if isinstance(fields, str) else json.dumps(fields)
    (path / "config.json").write_text(text, encoding="utf-8")
    return read_model_spec(path)
