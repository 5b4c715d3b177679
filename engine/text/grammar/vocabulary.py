"""Vocabulary: the tokens of a model as llguidance needs them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from llguidance import LLTokenizer

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
                "structured_outputs: not supported: the checkpoint names no end-of-sequence token"
            )
        try:
            return LLTokenizer(self.tokenizer_json, self.num_ids, self.eos_token_ids)
        except Exception as error:  # plain ones, from Rust
            raise UnsupportedError(
                f"structured_outputs: not supported with this checkpoint's tokenizer: {error}"
            ) from None

    def special_tokens(self, tokenizer: LLTokenizer) -> dict[str, int]:
        """Return the added tokens that are no text for llguidance: grammars name them by id.

        These are the special ones and those in angle brackets.
        """
        return {
            text: token_id
            for text, token_id in self.added_tokens.items()
            if tokenizer.is_special_token(token_id)
        }
