"""The tokenizer of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf.names import GGUF
from engine.checkpoint.gguf.reader import GgufFile
from engine.checkpoint.gguf.splits import mend_splits
from engine.errors import CheckpointError
from engine.fields import Fields

_FILE = "tokenizer.json"
# Pre-tokenizers of llama.cpp that come with a BOS token, if the file says nothing of it, and take a
# word that is a token as it is: those of Llama 3 and of Mistral's Tekken.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken")
# Types of tokens.
_CONTROL, _USER_DEFINED = 3, 4
# Tokens of Phi-3 that do not take the spaces after them; its other special ones do.
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")


def write_tokenizer(folder: Path, header: GgufFile) -> None:
    """Write the tokenizer's files and chat template into `folder`, which links to the file.

    Raises:
        CheckpointError: they cannot be made of the file's metadata.
    """
    _check_special_tokens(header)
    is_of_whole_words = header.metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    # Imported here: it takes seconds, and a file is converted once.
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(folder), gguf_file=GGUF, add_bos_token=is_of_whole_words
        )
        tokenizer.save_pretrained(str(folder))
    except Exception as error:  # transformers raises anything
        raise CheckpointError(f"{header.path}: its tokenizer cannot be read: {error}") from None
    content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    content["model"]["ignore_merges"] = is_of_whole_words
    mend_splits(content, header)
    _mend_added_tokens(content, header)
    (folder / _FILE).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _check_special_tokens(header: GgufFile) -> None:
    fields = Fields(header.metadata, name=header.path.name)
    num_tokens = len(fields.texts("tokenizer.ggml.tokens") or [])
    for name in fields.names():
        if name.startswith("tokenizer.ggml.") and name.endswith("_token_id"):
            token = fields.integer(name, default=None, minimum=0)
            if token is not None and token >= num_tokens:
                raise fields.error(name, f"{token} is not one of the {num_tokens} tokens")


def _mend_added_tokens(content: dict[str, Any], header: GgufFile) -> None:
    """Let the added tokens be the file's.

    transformers adds those of the class that it builds, with new ids, and leaves out those with
    letters that are not of the byte alphabet, such as DeepSeek's.
    """
    fields = Fields(header.metadata, name=header.path.name)
    tokens = fields.texts("tokenizer.ggml.tokens") or []
    types = fields.integers("tokenizer.ggml.token_type")
    vocab = content["model"]["vocab"]
    spelling = {token_id: token for token, token_id in vocab.items()}
    merged = {part for pair in content["model"]["merges"] for part in (*pair, "".join(pair))}
    added = {each["id"]: each for each in content["added_tokens"] if each["id"] < len(tokens)}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        spelled = spelling.get(token_id)
        if kind not in (_CONTROL, _USER_DEFINED) or token_id in added or spelled in merged:
            continue
        if spelled is not None and token not in vocab:
            del vocab[spelled]
            vocab[token] = token_id
        added[token_id] = {
            "id": token_id,
            "content": token,
            "special": kind == _CONTROL,
            "normalized": False,
            **dict.fromkeys(("single_word", "lstrip", "rstrip"), False),
        }
    if _is_phi3(header):
        for token in added.values():
            token["rstrip"] = token["special"] and token["content"] not in _PHI3_KEEPS_SPACES
    content["added_tokens"] = [added[token_id] for token_id in sorted(added)]


def _is_phi3(header: GgufFile) -> bool:
    """Return whether the tokenizer is Phi-3's; Phi-4 has another, and the same architecture."""
    names = ("general.architecture", "tokenizer.ggml.model")
    return [header.metadata.get(name) for name in names] == ["phi3", "llama"]
