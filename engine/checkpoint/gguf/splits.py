"""How a text is cut before tokens are looked for in it, where transformers makes it otherwise.

A GGUF file names its way (`tokenizer.ggml.pre`). Those that transformers knows are left alone; of
others here are those of models that are read from GGUF files, as in their published tokenizers.
"""

from __future__ import annotations

import logging
from typing import Any

from engine.checkpoint.gguf.reader import GgufFile
from engine.fields import Fields

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
            "%s: %s: %r is not known: texts are split into words as for GPT-2, which may make the "
            "model's answers worse",
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
