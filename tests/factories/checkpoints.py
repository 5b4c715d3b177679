"""Tiny random checkpoints, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

# One setting of every rope scaling. The lengths are short, so that tests go beyond them.
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
    """Write a seeded random checkpoint of 3 layers with grouped heads to the folder `path`.

    Args:
        rope: key of `ROPES`.
        max_shard_size: such as "50KB", to have it sharded.
        settings: fields of the configuration, in place of those here.

    Returns:
        The model that was written, in `dtype` and ready to be run; a tokenizer is not written.
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
        # Far above what is trained, so that the logits are not flat and the argmax is clear.
        "initializer_range": 0.3,
        "rope_parameters": dict(ROPES[rope]),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **settings,
    }
    if architecture == "MistralForCausalLM":
        fields.setdefault("sliding_window", None)
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    model_class = getattr(transformers, architecture)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**fields, dtype=dtype))
        _randomise_norms_and_biases(model)
    model = model.to(dtype).eval()
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


@torch.no_grad()
def _randomise_norms_and_biases(model: PreTrainedModel) -> None:
    """Transformers starts them at 1 and 0, where leaving them out would go unnoticed."""
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.normal_(1.0, 0.2)
        elif name.endswith("bias"):
            tensor.normal_(0.0, 0.3)
