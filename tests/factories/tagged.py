"""Tokenizers with tags: as special tokens, as plain added tokens, and as text in the template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from engine.text.detokenizer import Detokenizer
from engine.text.output_parsing.parser_spec import ParserSpec
from engine.text.tokenizer import Tokenizer
from tests.factories.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

Kind = Literal["byte_level", "byte_fallback"]
Form = Literal["special", "added", "text"]

_TURNS = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def template(*tags: str, opens: str = "") -> str:
    """Return a chat template that knows `tags`, and leaves `opens` at the end of a prompt."""
    mentions = "".join(f"{{% set tag{i} = {tag!r} %}}" for i, tag in enumerate(tags))
    return mentions + _TURNS.replace("<|assistant|>{% endif", f"<|assistant|>{opens}{{% endif")


def tagged_tokenizer(
    tags: Sequence[str], form: Form, *, kind: Kind = "byte_level", opens: str = ""
) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a checkpoint with these tags; `opens` ends its generation prompt."""
    hf_tokenizer = byte_level_tokenizer() if kind == "byte_level" else byte_fallback_tokenizer()
    hf_tokenizer.chat_template = template(*tags, opens=opens)
    if form != "text":
        added = [AddedToken(tag, normalized=False, special=form == "special") for tag in tags]
        hf_tokenizer.add_tokens(added, special_tokens=form == "special")
    return hf_tokenizer


@cache
def tagged(
    tags: Sequence[str], form: Form, *, kind: Kind = "byte_level", opens: str = ""
) -> Detokenizer:
    """Return the detokenizer of a checkpoint with these tags."""
    return Detokenizer(Tokenizer(tagged_tokenizer(tags, form, kind=kind, opens=opens)))


@cache
def format_of(detokenizer: Detokenizer, reasoning: str = "auto", tools: str = "auto") -> ParserSpec:
    """Return the format that is found for it, or named."""
    return ParserSpec(detokenizer.tokenizer, reasoning, tools)
