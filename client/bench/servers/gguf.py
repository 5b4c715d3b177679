"""`python -m client.bench.servers.gguf CHECKPOINT FILE`: converts a random checkpoint to GGUF.

llama.cpp's own converter rejects tokenizers that it does not know, such as that of our random
checkpoints.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import torch
from rich.progress import track
from safetensors import safe_open

TYPES = {
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
_TOKENIZER_PRE = "qwen2"  # llama.cpp's pre-tokenizer; not used with prompts of token ids


def convert(checkpoint: Path, out: Path, kind: str) -> None:
    """Write a Qwen2 checkpoint to `out` as GGUF, with matrices of type `kind` of `TYPES`.

    Raises:
        ValueError: the checkpoint has another architecture.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if config["architectures"] != ["Qwen2ForCausalLM"]:
        raise ValueError(f"{checkpoint}: must be a Qwen2 (it is {config['architectures']})")
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN2])
    _add_config(writer, config, kind)
    _add_tokenizer(writer, checkpoint, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    matrix_type = gguf.GGMLQuantizationType[kind.upper()]
    with safe_open(checkpoint / "model.safetensors", framework="pt") as tensors:
        for name in track(tensors.keys(), f"converting to {kind}"):
            values = tensors.get_tensor(name).to(torch.float32).numpy()
            to = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else matrix_type
            new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert new_name is not None, name
            writer.add_tensor(new_name, gguf.quants.quantize(values, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], kind: str) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(TYPES[kind])


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, vocab_size: int) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    # Ids that no text encodes to, but a random model may output, get a text of their own.
    tokens = [f"<{i}>" for i in range(vocab_size)]
    types = [gguf.TokenType.NORMAL] * vocab_size
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i] = token
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_TOKENIZER_PRE)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(json.loads((checkpoint / "config.json").read_text())["eos_token_id"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m client.bench.servers.gguf")
    parser.add_argument("checkpoint", type=Path, help="folder of a Qwen2 checkpoint")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--type", choices=tuple(TYPES), default="q8_0")
    arguments = parser.parse_args()
    try:
        convert(arguments.checkpoint, arguments.out, arguments.type)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
