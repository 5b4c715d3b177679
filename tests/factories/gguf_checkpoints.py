"""Tiny checkpoints as GGUF files, beside what their weights stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.factories.checkpoints import ROPES, write_checkpoint
from tests.factories.gguf_files import write_gguf
from tests.factories.paged_model import PagedModel
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer
from tests.factories.vision_families import MINISTRAL3

TOKENS = [(7 * i + i // 3) % 400 for i in range(50)]
SIZES = {"vocab_size": 400, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 16 for i in range(16)],
    "long_factor": [1.0 + i for i in range(16)],
    "original_max_position_embeddings": 96,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 256}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-scaled": ("LlamaForCausalLM", {"rope_parameters": ROPES["llama3"]}),
    "llama-linear": ("LlamaForCausalLM", {"rope_parameters": ROPES["linear"]}),
    "llama-yarn": ("LlamaForCausalLM", {"rope_parameters": ROPES["yarn"]}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "sliding_window": 9,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 64,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0},
            },
        },
    ),
    "ernie": ("Ernie4_5ForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "rope_parameters": {**ROPES["yarn"], "truncate": False},
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.22,
            "logits_scaling": 1.7,
        },
    ),
    "ministral3": ("Ministral3ForCausalLM", MINISTRAL3),
    "mistral3": ("MistralForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {**_MOE, "shared_expert_intermediate_size": 512, "norm_topk_prob": False},
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**_MOE, "norm_topk_prob": True}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {"rope_parameters": _LONGROPE, "sliding_window": 40}),
}


def write(folder: Path, family: str, *kinds: str, tokenizer: Any = None, **changes: Any) -> Path:
    """Write a checkpoint to `folder`/plain, and as a GGUF file, which is returned."""
    architecture, fields = FAMILIES[family]
    plain, path = folder / "plain", folder / "model-small.gguf"
    write_checkpoint(plain, architecture, initializer_range=0.1, **{**SIZES, **fields})
    save_tokenizer(tokenizer or byte_level_tokenizer(), plain)
    write_gguf(path, plain, kinds, **changes)
    return path


def logits(checkpoint: Path) -> torch.Tensor:
    return PagedModel(checkpoint, max_model_len=128).logits(TOKENS)
