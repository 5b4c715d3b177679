"""Tiny random checkpoints, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.demo.random_checkpoint import random_model

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

OMIT = object()

# One configuration of every rope scaling. Original lengths are short, so that tests exceed them.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
}


def write_checkpoint(
    path: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    rope: str = "default",
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    seed: int = 0,
    **settings: Any,
) -> PreTrainedModel:
    """Write a seeded random checkpoint of 3 layers with grouped-query attention to folder `path`.

    Args:
        rope: key of `ROPES`.
        max_shard_size: such as "50KB", to split it into shards.
        settings: fields of the configuration that override those here; `OMIT` leaves one out.

    Returns:
        The model that was written, in `dtype`, in eval mode; no tokenizer is written.
    """
    fields: dict[str, Any] = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        # Far larger than trained weights, so that the logits are not flat and the argmax is clear.
        "initializer_range": 0.3,
        "rope_parameters": dict(ROPES[rope]),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **settings,
    }
    if architecture == "MistralForCausalLM":
        fields.setdefault("sliding_window", None)
    fields = {name: value for name, value in fields.items() if value is not OMIT}
    if "vision_config" in fields:  # beside which the text's fields are in a part of their own
        vision = fields.pop("vision_config")
        tied = fields.pop("tie_word_embeddings", architecture.startswith("Gemma"))
        fields = {"text_config": fields, "vision_config": vision, "tie_word_embeddings": tied}
    model = random_model(architecture, dtype=dtype, seed=seed, fields=fields)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model
