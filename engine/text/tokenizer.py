"""Tokenizer: text to token ids and back, on the Rust tokenizer of a checkpoint."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from engine.checkpoint.json_files import read_object
from engine.errors import CheckpointError, RequestError, TridentError
from engine.text.content_formats import ContentFormat, find_content_formats

_JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# The template of a model with a vision part, from versions of transformers that wrote it nowhere
# else.
_PROCESSOR_TEMPLATE = "chat_template.json"
_SLOW_FILES = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")

_T = TypeVar("_T")


class Tokenizer:
    """A fast tokenizer. Immutable, so that threads may share it.

    Attributes:
        hf_tokenizer: the transformers tokenizer, which renders chat templates.
        vocab_size: one more than the largest id, added tokens included.
        special_ids: ids that `skip_special_tokens` leaves out of the text.
        added_token_ids: the tokens beside the vocabulary proper, special ones among them.
        byte_fallback_ids: ids that stand for one byte of UTF-8, `<0xE4>` (SentencePiece).
        decoder_steps: the steps of decoding: the decoder's JSON with sequences flattened.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        """Wrap `hf_tokenizer`, a transformers tokenizer with a Rust `backend_tokenizer`."""
        self.hf_tokenizer = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        # A checkpoint may set truncation from its training; prompts are never truncated silently.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size: int = max(self._backend.get_vocab().values(), default=-1) + 1
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_token_ids = {token.content: token_id for token_id, token in added.items()}
        self._token_texts = cache(self._decode_token)
        self.decoder_steps = _decoder_steps(self._backend.decoder)
        has_byte_fallback = any(step["type"] == "ByteFallback" for step in self.decoder_steps)
        self.byte_fallback_ids = (
            frozenset(_byte_fallback_ids(self._backend)) if has_byte_fallback else frozenset()
        )

    @classmethod
    def from_pretrained(cls, path: Path) -> Tokenizer:
        """Load `tokenizer.json` of the checkpoint folder `path`, unchanged.

        Code from the folder is never run. What transformers would build from other files (a
        SentencePiece `tokenizer.model`) is refused: it depends on packages that may be missing.

        Raises:
            CheckpointError: there is no `tokenizer.json`, or one of the tokenizer's files is
                broken.
        """
        if not path.is_dir():
            raise CheckpointError("no such checkpoint folder", param=str(path))
        if not (path / "tokenizer.json").is_file():
            raise CheckpointError(_what_is_missing(path))
        for name in _JSON_FILES:
            read_object(path / name)
        processor_template = _processor_template(path)
        # Imported here: it takes half a second. Not AutoTokenizer, which imports torch to choose a
        # class that reads the same file.
        from transformers import PreTrainedTokenizerFast

        try:
            load = PreTrainedTokenizerFast.from_pretrained
            tokenizer = _call_rust(lambda: cls(load(str(path), local_files_only=True)))
        except Exception as error:  # the Rust side raises plain `Exception`, transformers anything
            raise CheckpointError(f"cannot be loaded: {error}", param="tokenizer.json") from None
        if not tokenizer.hf_tokenizer.chat_template:
            tokenizer.hf_tokenizer.chat_template = processor_template
        return tokenizer

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence token, if it names one."""
        token_id: int | None = self.hf_tokenizer.eos_token_id
        return token_id

    @property
    def pad_token_id(self) -> int | None:
        """The padding token, if the tokenizer names one."""
        token_id: int | None = self.hf_tokenizer.pad_token_id
        return token_id

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the added tokens, which are found in a text before all others, by their text."""
        added = self._backend.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in added}

    def to_json(self) -> str:
        """Return the content of a `tokenizer.json`, tokens added since included."""
        text: str = self._backend.to_str()
        return text

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered without naming a template."""
        template = self.hf_tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return isinstance(template, str) and template != ""

    @property
    def chat_template_text(self) -> str:
        """The source of all its chat templates; empty if there is none."""
        template = self.hf_tokenizer.chat_template or ""
        return template if isinstance(template, str) else "\n".join(map(str, template.values()))

    def with_chat_template(self, template: str) -> Tokenizer:
        """Return this tokenizer with `template` in place of all its chat templates."""
        other = copy(self)
        other.__dict__.pop("content_formats", None)
        other.hf_tokenizer = copy(self.hf_tokenizer)
        other.hf_tokenizer.chat_template = template
        return other

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **arguments: Any) -> str:
        """Return the prompt that the chat template makes; it may raise anything.

        Args:
            messages: their contents are in the formats of `content_formats`.
            arguments: of `apply_chat_template` of transformers.
        """
        prompt: str = self.hf_tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        return prompt

    @cached_property
    def content_formats(self) -> dict[str, ContentFormat]:
        """The form that the chat template takes the content of messages in, by role."""
        return find_content_formats(self.apply_chat_template)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, field: str = "prompt"
    ) -> list[int]:
        """Return the ids of `text`, with the tokens that start a prompt if asked for.

        Raises:
            RequestError: `text`, the value of `field`, has lone surrogates, which no encoding of
                Unicode can express, or characters without a token in the vocabulary.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"is not valid Unicode: lone surrogate at character {error.start}", param=field
            ) from None
        try:
            encoding = _call_rust(
                lambda: self._backend.encode(text, add_special_tokens=add_special_tokens)
            )
        except Exception as error:  # the Rust side raises plain `Exception`
            raise RequestError(f"cannot be tokenized: {error}", param=field) from None
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, without any clean-up. Unknown ids have no text.

        Raises:
            TridentError: the decoder of the checkpoint fails on them.
        """
        try:
            text: str = _call_rust(
                lambda: self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            )
        except Exception as error:
            raise TridentError(f"the tokenizer cannot decode the tokens: {error}") from None
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as spelt in the vocabulary, None for an unknown id."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def is_visible(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the token takes part in decoding."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        return self.id_to_token(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """Return the text of one token inside a sentence; invalid UTF-8 becomes U+FFFD."""
        return self._token_texts(token_id)

    def _decode_token(self, token_id: int) -> str:
        token = self.id_to_token(token_id)
        if token is None or self._backend.decoder is None:
            return token or ""
        # Many decoders drop the space at the start of a text, so another token goes first.
        text: str = _call_rust(lambda: self._backend.decoder.decode(["a", token]))
        return text.removeprefix("a")

    def text_token_ids(self) -> list[int]:
        """Return the ids, special ones aside, that have a text: at least one whole character."""
        return [
            token_id
            for token_id in range(self.vocab_size)
            if self.is_visible(token_id, skip_special_tokens=True)
            and (text := self.token_text(token_id))
            and "\ufffd" not in text
        ]


def _call_rust(call: Callable[[], _T]) -> _T:
    """Return the result of `call`; raise a panic of Rust, which is no `Exception`, as RuntimeError.

    Some decoders and normalizers panic on some texts; that must not end the process.
    """
    try:
        return call()
    except Exception:
        raise
    except BaseException as panic:
        if type(panic).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError(f"tokenizers panicked: {panic}") from None


def _processor_template(path: Path) -> str | dict[str, str] | None:
    """Return the template, or the templates by their names, beside the tokenizer's files."""
    template = read_object(path / _PROCESSOR_TEMPLATE).get("chat_template")
    texts = template.values() if isinstance(template, dict) else [template or ""]
    if not all(isinstance(text, str) for text in texts):
        raise CheckpointError("must be a text", param=f"{_PROCESSOR_TEMPLATE}: chat_template")
    return template


def _what_is_missing(path: Path) -> str:
    found = [name for name in _SLOW_FILES if (path / name).is_file()]
    if not found:
        return f"{path}: no tokenizer.json"
    return (
        f"{path}: no tokenizer.json, only {found[0]} of a slow tokenizer; convert it with "
        "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    def flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
        if step["type"] == "Sequence":
            return [inner for part in step["decoders"] for inner in flatten(part)]
        return [step]

    return [] if decoder is None else flatten(json.loads(decoder.__getstate__()))


def _byte_fallback_ids(backend: Any) -> set[int]:
    digits = itertools.product(string.hexdigits + "+", string.hexdigits)  # as Rust parses a u8
    ids = (backend.token_to_id(f"<0x{high}{low}>") for high, low in digits)
    return {token_id for token_id in ids if token_id is not None}
