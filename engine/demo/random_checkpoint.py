"""Seeded random checkpoints with the demo's tokenizer, for benchmarks: their text is meaningless.

python -m engine.demo.random_checkpoint 0.4b FOLDER
"""

from __future__ import annotations

import argparse
import itertools
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from engine.demo import CHECKPOINT_DIR
from engine.text.tokenizer import Tokenizer

COMMON = {"vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False}
# The shape of Qwen2.5-0.5B, with a smaller vocabulary.
_QWEN = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.1b": (
        "LlamaForCausalLM",
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
        },
    ),
    "0.4b": ("Qwen2ForCausalLM", _QWEN),
    "0.4b-tied": (
        "Qwen2ForCausalLM",
        {**_QWEN, "tie_word_embeddings": True, "max_position_embeddings": 10240},
    ),
    "0.4b-gemma2": (
        "Gemma2ForCausalLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "query_pre_attn_scalar": 128,
            "sliding_window": 1024,
            "tie_word_embeddings": True,
        },
    ),
    # 0.4b are used for a token, of 1.2b.
    "0.4b-moe": (
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "moe_intermediate_size": 384,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 32,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    # The shapes of LFM2-1.2B and of the text of Qwen3.5-0.8B, with their vocabularies.
    "lfm2-1.2b": (
        "Lfm2ForCausalLM",
        {
            "vocab_size": 65536,
            "conv_dim": 2048,  # which vLLM asks for
            "hidden_size": 2048,
            "intermediate_size": 12288,  # of which 8192 are left
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "layer_types": [
                "full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)
            ],
            "max_position_embeddings": 128000,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-0.8b": (
        "Qwen3_5ForCausalLM",
        {
            "vocab_size": 248320,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
        },
    ),
}


def random_model(
    architecture: str, *, dtype: torch.dtype, seed: int, fields: dict[str, Any]
) -> PreTrainedModel:
    """Return a transformers model with seeded random weights, including norms and biases.

    Args:
        architecture: such as `LlamaForCausalLM`.
        fields: fields of its configuration.
    """
    model_class = getattr(transformers, architecture)
    config_class = model_class.config_class
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config_class(**fields, dtype=dtype))
        _randomise_norms_and_biases(model)
    return model.to(dtype).eval()


@torch.no_grad()
def _randomise_norms_and_biases(model: PreTrainedModel) -> None:
    """Transformers initialises them to 1 and 0, which would hide an implementation without them.

    And linear attention so that it forgets a token at once, which would hide one without its state.
    """
    # Some biases of routers are buffers.
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if "norm" in name or ".ln_" in name:  # GPT-2's
            tensor.normal_(1.0, 0.2)
        elif name.endswith("bias"):
            tensor.normal_(0.0, 0.3)
        elif name.endswith("A_log"):
            tensor.uniform_(-5.0, 0.0)  # remembers from two to some hundred tokens


def write_random_checkpoint(size: str, folder: Path) -> None:
    """Write the bf16 checkpoint of `size`, a key of `SIZES`, to `folder`.

    Greedy output has only tokens of the tokenizer, each one or more whole characters: all of it
    decodes to text, like a trained model's.
    """
    architecture, fields = SIZES[size]
    tokenizer = Tokenizer.from_pretrained(CHECKPOINT_DIR)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    model = random_model(
        architecture, dtype=torch.bfloat16, seed=0, fields={**COMMON, **fields, **ends}
    )
    textless = torch.tensor([not _is_text(tokenizer, i) for i in range(model.config.vocab_size)])
    with torch.no_grad():
        model.get_output_embeddings().weight[textless] = 0.0  # never the largest logit
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(CHECKPOINT_DIR / name, folder / name)


def _is_text(tokenizer: Tokenizer, token_id: int) -> bool:
    return tokenizer.is_visible(
        token_id, skip_special_tokens=True
    ) and "\N{REPLACEMENT CHARACTER}" not in tokenizer.token_text(token_id)


def main() -> None:
    """Entry point of the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_random_checkpoint(arguments.size, arguments.folder)


if __name__ == "__main__":
    main()
