"""The tokenizer of a GGUF file."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf.names import GGUF
from engine.checkpoint.gguf.reader import GgufFile
from engine.errors import CheckpointError
from engine.fields import Fields

_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"
# Pre-tokenizers of llama.cpp that come with a BOS token, if the file does not name it, and take a
# word that is a token as it is: those of Llama 3 and of Mistral's Tekken.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken")
# Types of tokens.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
# Fields of tokens that are special in every text, whatever type the file gives them.
_ALWAYS_SPECIAL = ("bos", "eos", "eot", "eom")
# Fields of tokens that may be ordinary text, by what transformers calls them.
_MAYBE_TEXT = {"pad_token": "padding", "unk_token": "unknown"}
# Tokens of Phi-3 that do not take the spaces after them; its other special ones do.
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")

log = logging.getLogger("trident.gguf")

_PRE = "tokenizer.ggml.pre"
_SPACE = "▁"

_Step = dict[str, Any]


def _isolated(pattern: str) -> _Step:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _bytes(*, in_words: bool) -> _Step:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": in_words,
    }


_BYTES, _GPT2 = _bytes(in_words=False), _bytes(in_words=True)
_EACH_DIGIT: _Step = {"type": "Digits", "individual_digits": True}
_LINE_BREAKS = _isolated(r"[\r\n]")
_EASTERN = _isolated("[一-龥ࠀ-一가-퟿]+")
# Letters with cases; not those of Armenian and Georgian that got theirs late.
_CASED = "(?:(?![\u0560-\u0588\u10d0-\u10ff])[\\p{Lu}\\p{Ll}\\p{Lt}])"
_SEED_CODER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
_SPLITS: dict[str, tuple[_Step, ...]] = {
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat"),
            *("a.x-4.0", "mellum", "trillion", "granite-docling"),
        ),
        (_GPT2,),
    ),
    **dict.fromkeys(
        (
            *("starcoder", "refact", "command-r", "smollm", "codeshell"),
            *("exaone", "minerva-7b", "mellum2"),
        ),
        (_EACH_DIGIT, _GPT2),
    ),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_isolated("|".join(_LLAMA3)), _BYTES)),
    "deepseek-llm": (
        _LINE_BREAKS,
        _isolated(rf"\s?{_CASED}+"),
        _isolated("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
        _isolated(r"\s+$"),
        _EASTERN,
        _EACH_DIGIT,
        _BYTES,
    ),
    "deepseek-coder": (
        _LINE_BREAKS,
        _isolated(r"\s?\p{L}+"),
        _isolated(r"\s?\p{P}+"),
        _EASTERN,
        _EACH_DIGIT,
        _BYTES,
    ),
    "seed-coder": (_isolated("|".join(_SEED_CODER)), _BYTES),
    "viking": (_isolated(" ?[^(\\s|.,!?…。\uff0c、।\u06d4،)]+"), _EACH_DIGIT, _BYTES),
}


def mend_splits(content: dict[str, Any], header: GgufFile) -> None:
    """Let the text be cut as the file's model needs it.

    Args:
        content: of a `tokenizer.json`.

    Raises:
        CheckpointError: a field is wrong.
    """
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        _mend_words(content, header)
    elif kind == "llama" and not header.metadata["general.architecture"].startswith("gemma"):
        fields = Fields(header.metadata, name=header.path.name)
        _mend_spaces(content, fields.boolean("tokenizer.ggml.add_space_prefix", default=True))


def _mend_words(content: dict[str, Any], header: GgufFile) -> None:
    if content["pre_tokenizer"]["type"] != "ByteLevel":  # transformers' for names it does not know
        return
    name = header.metadata.get(_PRE)
    if name not in _SPLITS:
        log.warning(
            "%s: %s: %r is unknown: text is split into words as for GPT-2, which may lower the "
            "quality of the output",
            *(header.path.name, _PRE, name),
        )
        return
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*_SPLITS[name]]}


def _mend_spaces(content: dict[str, Any], has_prefix: bool) -> None:
    """Let a text begin with a space, or not, also one that follows a special token.

    transformers puts it at the start of a prompt alone, and not where there is one already.
    """
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    content["normalizer"] = {"type": "Sequence", "normalizers": [*prefix, replace]}
    content["pre_tokenizer"] = None
    if not has_prefix:
        steps = content["decoder"]["decoders"]
        content["decoder"]["decoders"] = [step for step in steps if step["type"] != "Strip"]


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
        raise CheckpointError(
            f"the tokenizer cannot be read: {error}", param=str(header.path)
        ) from None
    content, config = _read(folder / _FILE), _read(folder / _CONFIG)
    if content["model"]["type"] != "BPE":
        kind = header.metadata.get("tokenizer.ggml.model")
        raise CheckpointError(
            f"the tokenizer type {kind!r} is not supported", param=str(header.path)
        )
    content["model"]["ignore_merges"] = is_of_whole_words
    mend_splits(content, header)
    _mend_special_tokens(content, config, header)
    for name, made in ((_FILE, content), (_CONFIG, config)):
        (folder / name).write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return made


def _check_special_tokens(header: GgufFile) -> None:
    fields = Fields(header.metadata, name=header.path.name)
    num_tokens = len(fields.texts("tokenizer.ggml.tokens") or [])
    for name in fields.names():
        if name.startswith("tokenizer.ggml.") and name.endswith("_token_id"):
            token = fields.integer(name, default=None, minimum=0)
            if token is not None and token >= num_tokens:
                raise fields.error(name, f"must be a token id below {num_tokens} (got {token})")


def _mend_special_tokens(content: dict[str, Any], config: dict[str, Any], header: GgufFile) -> None:
    """Let the special and other added tokens be the file's, with the file's ids.

    transformers adds those of the class that it builds, with new ids. Those with letters that are
    not of the byte alphabet, such as DeepSeek's, it leaves out, or gives a new id where the file
    names them.

    Args:
        content: of `tokenizer.json`.
        config: of `tokenizer_config.json`.
    """
    fields = Fields(header.metadata, name=header.path.name)
    tokens = fields.texts("tokenizer.ggml.tokens") or []
    kinds = dict(enumerate(fields.integers("tokenizer.ggml.token_type")))
    always = _named(fields, _ALWAYS_SPECIAL)
    for name, field in _MAYBE_TEXT.items():
        for token_id in _named(fields, [field]) - always:
            if kinds.get(token_id) == _NORMAL:
                config.pop(name, None)
                _remove_added(content, tokens[token_id])
    kinds |= dict.fromkeys(always, _CONTROL)
    _mend_added_tokens(content, tokens, kinds, always)
    if _is_phi3(header):
        for token in content["added_tokens"]:
            token["rstrip"] = token["special"] and token["content"] not in _PHI3_KEEPS_SPACES
    ids = {tokens[token_id]: token_id for token_id in always}
    for text, token in (content["post_processor"] or {}).get("special_tokens", {}).items():
        token["ids"] = [ids[text]]  # that which begins or ends every prompt


def _named(fields: Fields, names: Iterable[str]) -> set[int]:
    """Return the ids that the file names as these tokens."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in names)
    ids = (fields.integer(key, default=None, minimum=0) for key in keys)
    return {token_id for token_id in ids if token_id is not None}


def _remove_added(content: dict[str, Any], text: str) -> None:
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"] != text]


def _mend_added_tokens(
    content: dict[str, Any], tokens: Sequence[str], kinds: Mapping[int, int], always: set[int]
) -> None:
    """Add the tokens that are of the `kinds` that are added, or `always`."""
    vocab = content["model"]["vocab"]
    spelling = {token_id: token for token, token_id in vocab.items()}
    merged = {part for pair in content["model"]["merges"] for part in (*pair, "".join(pair))}
    added = {each["id"]: each for each in content["added_tokens"] if each["id"] < len(tokens)}
    for token_id, token in enumerate(tokens):
        kind, spelled = kinds.get(token_id), spelling.get(token_id)
        if kind not in (_CONTROL, _USER_DEFINED) or token_id in added:
            continue
        if spelled in merged and token_id not in always:
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
    content["added_tokens"] = [added[token_id] for token_id in sorted(added)]


def _is_phi3(header: GgufFile) -> bool:
    """Return whether the tokenizer is Phi-3's; Phi-4 has another, and the same architecture."""
    names = ("general.architecture", "tokenizer.ggml.model")
    return [header.metadata.get(name) for name in names] == ["phi3", "llama"]
