"""Vocabulary: the tokens of a model as llguidance needs them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from engine.errors import UnsupportedError
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """All that a compiled grammar depends on beside its text. Can be written as JSON.

    Attributes:
        tokenizer_json: content of `tokenizer.json`.
        size: logits per token, which may exceed the tokenizer's ids: those are never allowed.
        num_ids: ids in a mask.
        eos_token_ids: tokens that are allowed where the grammar may end.
        added_tokens: ids by text, of the tokens that the tokenizer finds before all others.
    """

    tokenizer_json: str
    size: int
    num_ids: int
    eos_token_ids: list[int]
    added_tokens: dict[str, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, eos_token_ids: Collection[int]) -> Vocabulary:
        """Return that of a model with `size` logits per token."""
        return cls(
            tokenizer_json=tokenizer.to_json(),
            size=size,
            num_ids=max(size, tokenizer.vocab_size),
            eos_token_ids=sorted(eos_token_ids),
            added_tokens=tokenizer.added_tokens,
        )

    def ll_tokenizer(self) -> LLTokenizer:
        """Build the prefix tree of all tokens: up to a second for large vocabularies.

        Raises:
            UnsupportedError: llguidance does not know how these tokens make text, or none of them
                ends a sequence.
        """
        if not self.eos_token_ids:
            raise UnsupportedError(
                "not supported: the checkpoint names no end-of-sequence token",
                param="structured_outputs",
            )
        try:
            return LLTokenizer(self.tokenizer_json, self.num_ids, self.eos_token_ids)
        except Exception as error:  # plain ones, from Rust
            raise UnsupportedError(
                f"not supported with this checkpoint's tokenizer: {error}",
                param="structured_outputs",
            ) from None

    def text_ends(self, tokenizer: LLTokenizer) -> TextEnds | None:
        """Return the tokens that end a sequence and are text for llguidance; None: none is."""
        ends = [i for i in self.eos_token_ids if not tokenizer.is_special_token(i)]
        return TextEnds(tokenizer, ends) if ends else None

    def special_tokens(self, tokenizer: LLTokenizer) -> dict[str, int]:
        """Return the added tokens that are no text for llguidance: grammars name them by id.

        These are the special ones and those in angle brackets.
        """
        return {
            text: token_id
            for text, token_id in self.added_tokens.items()
            if tokenizer.is_special_token(token_id)
        }


class TextEnds:
    """Tokens that end a sequence and are also ordinary text: they never stand for that text.

    llguidance allows them as both. Where the text may not end yet, a sequence that drew one would
    end in the middle.
    """

    def __init__(self, tokenizer: LLTokenizer, token_ids: Collection[int]) -> None:
        """`token_ids` are those of `tokenizer`."""
        self.token_ids = frozenset(token_ids)
        self._tokenizer = tokenizer
        bits = np.zeros(-(-tokenizer.vocab_size // 32) * 32, dtype=np.uint8)
        bits[[*token_ids]] = 1
        self._mask = np.packbits(bits, bitorder="little").view(np.int32)

    def forbid(self, mask: NDArray[np.int32], matcher: LLMatcher) -> None:
        """Leave them out of the `mask` of `matcher`, unless the text may end here.

        Where llguidance allows the one token alone that it would tokenise the text to, other tokens
        of the same text take its place.
        """
        if matcher.is_accepting() or not (mask & self._mask).any():
            return
        mask &= ~self._mask
        if mask.any():
            return
        text = matcher.compute_ff_bytes()
        for size in range(1, min(len(text), self._longest) + 1):
            if (token_id := self._by_text.get(text[:size])) is not None:
                mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)

    @cached_property
    def _by_text(self) -> dict[bytes, int]:
        """The other tokens by what they stand for."""
        tokens, others = self._tokenizer, range(self._tokenizer.vocab_size)
        return {
            text: token_id
            for token_id in others
            if token_id not in self.token_ids and not tokens.is_special_token(token_id)
            if (text := tokens.decode_bytes([token_id]))
        }

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_text), default=0)
