"""GGUF files of checkpoints, written with the package `gguf`.

`python -m tests.factories.gguf_files CHECKPOINT FILE --type q8_0` converts a random checkpoint of
`trident bench`: llama.cpp's own converter rejects tokenizers that it does not know.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.factories.gguf_experts import with_experts_apart, with_experts_together

_ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Ministral3ForCausalLM": gguf.MODEL_ARCH.MISTRAL3,
    "MistralForCausalLM": gguf.MODEL_ARCH.MISTRAL3,
    "Ernie4_5ForCausalLM": gguf.MODEL_ARCH.ERNIE4_5,
    "Glm4ForCausalLM": gguf.MODEL_ARCH.GLM4,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "GemmaForCausalLM": gguf.MODEL_ARCH.GEMMA,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
}
_IN_PAIRS = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.MISTRAL3)
# Types that the package cannot write -> where their blocks have float16 scales, and how large these
# must be for weights of about 0.1.
_SCALES = {
    "Q2_K": ((80, 0.03), (82, 0.02)),
    "Q3_K": ((108, 0.003),),
    "Q4_K": ((0, 0.0008), (2, 0.004)),
    "Q5_K": ((0, 0.0004), (2, 0.004)),
    "Q6_K": ((208, 0.0001),),
    "IQ4_NL": ((0, 0.002),),
    "IQ4_XS": ((0, 0.0001),),
}


def write_gguf(
    path: Path, checkpoint: Path, kinds: Sequence[str], *, tensors_per_file: int = 0, **changes: Any
) -> None:
    """As `convert`; the weights of `checkpoint` become those that the file stands for."""
    floats = convert(path, checkpoint, kinds, tensors_per_file=tensors_per_file, **changes)
    save_file(floats, checkpoint / "model.safetensors", {"format": "pt"})


def convert(
    path: Path, checkpoint: Path, kinds: Sequence[str], *, tensors_per_file: int = 0, **changes: Any
) -> dict[str, torch.Tensor]:
    """Write the checkpoint in folder `checkpoint` as a GGUF file, with its tokenizer.

    Returns the weights that the file's blocks stand for.

    Args:
        kinds: types of the matrices, in turn.
        tensors_per_file: writes parts, called as llama.cpp calls them; 0: one file.
        changes: keys of the metadata, dots as underscores; None leaves one out.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = _ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=tensors_per_file)
    _add_config(writer, config)
    _add_tokenizer(writer, checkpoint, config["vocab_size"])
    for key, value in changes.items():
        _change(writer, key, value)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    floats = with_experts_together(load_file(checkpoint / "model.safetensors"))
    draw = np.random.default_rng(0)
    for i, (name, tensor) in enumerate(sorted(floats.items())):
        values = tensor.float().numpy()
        is_matrix = values.ndim > 1 and not name.endswith("bias")
        kind = gguf.GGMLQuantizationType[kinds[i % len(kinds)] if is_matrix else "F32"]
        heads = _heads(name, config) if arch in _IN_PAIRS else None
        if heads:
            values = _in_pairs(values, heads)
        if "norm" in name and arch.name.startswith("GEMMA"):
            values = values + 1
        blocks = _blocks(values, kind, draw)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), blocks, raw_dtype=kind
        )
        if is_matrix:
            stored = dequantize(blocks, kind)
            if heads:
                stored = _in_halves(stored, heads)
            floats[name] = torch.from_numpy(np.ascontiguousarray(stored, np.float32))
    floats = with_experts_apart(floats, is_gpt_oss=arch == gguf.MODEL_ARCH.GPT_OSS)
    _add_rope_factors(writer, checkpoint)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return floats


def write_vocabulary(path: Path, folder: Path, architecture: str, **changes: Any) -> None:
    """Write the tokenizer in `folder` as a GGUF file without tensors; `changes` as in `convert`."""
    writer = gguf.GGUFWriter(path, architecture)
    vocab = json.loads((folder / "tokenizer.json").read_text())
    _add_tokenizer(writer, folder, len(vocab["model"]["vocab"]) + len(vocab["added_tokens"]))
    for key, value in changes.items():
        _change(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(values: np.ndarray, kind: gguf.GGMLQuantizationType, draw: np.random.Generator) -> Any:
    """Return the bytes of `values` or, in a type that cannot be written, of others."""
    if kind.name not in _SCALES:
        return quantize(values, kind)
    return random_blocks(values.shape, kind, draw)


def random_blocks(
    shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, draw: np.random.Generator
) -> Any:
    """Return the bytes of blocks of weights [..., inputs]."""
    if kind.name not in _SCALES:
        return quantize(draw.normal(size=shape).astype(np.float32), kind)
    num_elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    *rows, num_inputs = shape
    shape = (*rows, num_inputs // num_elements, num_bytes)
    blocks = draw.integers(0, 256, shape, dtype=np.uint8)
    for offset, scale in _SCALES[kind.name]:
        scales = draw.uniform(0.5 * scale, scale, (*shape[:-1], 1)).astype(np.float16)
        blocks[..., offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(*rows, -1)


def _heads(name: str, config: dict[str, Any]) -> int | None:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    return next((config[field] for part, field in heads.items() if part in name), None)


def _in_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows with those that are rotated together side by side."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _in_halves(values: np.ndarray, heads: int) -> np.ndarray:
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    by_type = "full_attention" in rope
    rope = rope["full_attention"] if by_type else rope
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    expert_size = config.get("moe_intermediate_size", config["intermediate_size"])
    if num_experts:
        writer.add_expert_feed_forward_length(expert_size)
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "attention_multiplier" in config:
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_rope_factors(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, vocab_size: int) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for token, i in vocab.items():
        tokens[i] = token
        is_byte = token.startswith("<0x")
        types[i] = gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        control, plain = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
        types[added["id"]] = control if added["special"] else plain
    merges = tokenizer["model"]["merges"]
    if "<s>" in vocab:  # SentencePiece
        writer.add_tokenizer_model("llama")
        order = {"".join(pair): -1.0 - i for i, pair in enumerate(merges)}
        writer.add_token_scores([order.get(token, -1000.0) for token in tokens])
        writer.add_add_bos_token(True)
        writer.add_bos_token_id(tokens.index("<s>"))
        writer.add_unk_token_id(tokens.index("<unk>"))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_eos_token_id(tokens.index(settings["eos_token"]))
    template = checkpoint / "chat_template.jinja"
    writer.add_chat_template(
        template.read_text() if template.exists() else settings["chat_template"]
    )


def _change(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Set a field, or leave it out; a function makes the value of that which there is."""
    fields = writer.kv_data[0]
    name = next((name for name in fields if name.replace(".", "_") == key), key)
    old = fields.pop(name, None)
    if callable(value):
        value = value(old.value)
    if value is not None:
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(name, value, kind)


def main() -> None:
    """Entry point of the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="q8_0", choices=("bf16", "q8_0", "q4_0"))
    given = parser.parse_args()
    convert(given.out, given.checkpoint, [given.type.upper()])


if __name__ == "__main__":
    main()
