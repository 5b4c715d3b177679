"""Detokenizer: incremental decoding of new tokens to text, stateless between calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.protocol.messages import OutputDetails, SequenceOutput
from engine.text.byte_sets import ByteSets, byte_sets
from engine.text.decoders.byte_level import ByteLevelRule
from engine.text.decoders.tokenwise import TokenwiseRule
from engine.text.decoders.unknown import UnknownRule
from engine.text.stop.automaton import StopAutomaton
from engine.text.stop.search import TokenScanner
from engine.text.tokenizer import Tokenizer


class TextRule(Protocol):
    """How the decoder of a tokenizer makes text of tokens, so that it can be done in parts.

    Decoding is not token by token: characters are split over tokens, and the start of a text is
    treated specially. There is a rule for each kind of decoder, so that `Detokenizer` is exact with
    a short window of ids in place of all previous ids.
    """

    def delta(
        self, window_ids: Sequence[int], new_ids: Sequence[int], final: bool, skip: bool
    ) -> str:
        """Return the text that `new_ids` add after `window_ids`.

        Without `final`, the end that later tokens could still change is held back.
        """

    def window(self, ids: Sequence[int], skip: bool) -> list[int]:
        """Return ids after which further tokens decode to the same text as after all of `ids`.

        They hold all text that is not final yet. They are few, however many tokens without text
        there are; only an open run of byte-fallback tokens is kept whole.
        """

    def prompt_window(self, ids: Sequence[int], skip: bool) -> list[int]:
        """Return the window of a prompt; at most an incomplete character is not final."""

    def opens(self, token_id: int, skip: bool) -> bool:
        """Whether the token alone is a window of all ids that end with it."""

    def whole_text(self, token_id: int) -> bytes | None:
        """Return the UTF-8 text that the token has after any text; None if that depends on more.

        With special tokens not skipped; of an unknown id it is empty.
        """

    def raw_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that the token adds to a text, also parts of characters; None: unknown.

        Special tokens and unknown ids as in `whole_text`.
        """

    def scanner(
        self, automaton: StopAutomaton, window_ids: Sequence[int], skip: bool
    ) -> TokenScanner:
        """Return a search for stop strings in the output after a prompt with this window."""


@dataclass(frozen=True)
class TokenFlags:
    """What the engine must know of each token's text, as arrays over the model's vocabulary.

    Attributes:
        opens_window: [2, vocab_size]; `opens_window[skip_special_tokens, token_id]`: the token
            alone is the window of the tokens after it, whatever was before it.
        byte_sets: [vocab_size, 4]; the bytes of the token's text, for `StopChecker.watch`.
    """

    opens_window: NDArray[np.bool_]
    byte_sets: ByteSets


class Detokenizer:
    """Decodes chunks of token ids to pieces of text, given a window of the ids before each.

    With windows from `prompt_window` and `next_window`, the pieces join to the same text however a
    sequence is cut into chunks; after an empty prompt that is `Tokenizer.decode` of the whole.
    Threads may share it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._rule = _text_rule(tokenizer)

    def delta(
        self,
        window_ids: Sequence[int],
        new_ids: Sequence[int],
        *,
        final: bool,
        skip_special_tokens: bool = True,
    ) -> str:
        """Return the text that `new_ids` add after `window_ids`.

        Text that later tokens could still change (an incomplete character) is held back for the
        next delta; with `final` nothing is. `new_ids` may be empty.
        """
        return self._rule.delta(window_ids, new_ids, final, skip_special_tokens)

    def text(
        self,
        window_ids: Sequence[int],
        new_ids: Sequence[int],
        details: OutputDetails | SequenceOutput,
        *,
        skip_special_tokens: bool = True,
    ) -> str:
        """Return the text that `new_ids` add, without the stop string or stop token."""
        text = self.delta(
            window_ids,
            new_ids[:-1] if details.omit_stop_token else new_ids,
            final=details.finish_reason is not None,
            skip_special_tokens=skip_special_tokens,
        )
        return text[: len(text) - details.text_cut]

    def next_window(
        self,
        window_ids: Sequence[int],
        new_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> list[int]:
        """Return the window of the tokens after `new_ids`, whose own window was `window_ids`.

        It is the last token alone if that has `TokenFlags.opens_window`, as nearly all have. Else
        it is a few tokens long, plus an open run of byte-fallback tokens.
        """
        if new_ids and self._rule.opens(new_ids[-1], skip_special_tokens):
            return [new_ids[-1]]
        return self._rule.window([*window_ids, *new_ids], skip_special_tokens)

    def prompt_window(
        self, prompt_ids: Sequence[int] | NDArray[np.int32], *, skip_special_tokens: bool = True
    ) -> list[int]:
        """Return the few last ids of a prompt that are needed to decode its output.

        All their text is final, except a character that the prompt leaves incomplete.
        """
        if len(prompt_ids) and self._rule.opens(int(prompt_ids[-1]), skip_special_tokens):
            return [int(prompt_ids[-1])]
        ids = prompt_ids.tolist() if isinstance(prompt_ids, np.ndarray) else prompt_ids
        return self._rule.prompt_window(ids, skip_special_tokens)

    def scanner(
        self, automaton: StopAutomaton, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> TokenScanner:
        """Return a search for stop strings in the output after a prompt, or its window."""
        window = self._rule.prompt_window(prompt_ids, skip_special_tokens)
        return self._rule.scanner(automaton, window, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text that a token has after others, special ones shown.

        Where it is a part of a character, that is U+FFFD.
        """
        text = self._rule.whole_text(token_id)
        if text is None:
            return self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text.decode("utf-8")

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that a token adds to a text, also parts of characters; None: unknown."""
        return self._rule.raw_bytes(token_id)

    def token_flags(self, vocab_size: int) -> TokenFlags:
        """Return what is known of each token of a model; it may know more ids than the tokenizer.

        Takes up to four microseconds per token.
        """
        ids = range(vocab_size)
        shown = np.array([self._rule.opens(token_id, False) for token_id in ids])
        skipped = shown.copy()
        skipped[[i for i in self.tokenizer.special_ids if i in ids]] = False
        texts = [self._rule.whole_text(token_id) for token_id in ids]
        return TokenFlags(np.stack([shown, skipped]), byte_sets(texts))


def _text_rule(tokenizer: Tokenizer) -> TextRule:
    """Return the rule for the decoder of `tokenizer`."""
    steps = tokenizer.decoder_steps
    kinds = " ".join(step["type"] for step in steps)
    if kinds == "ByteLevel":
        return ByteLevelRule(tokenizer)
    strips_ends = any(step["type"] == "Strip" and step["stop"] for step in steps)
    if re.fullmatch(r"Metaspace|(Replace ?)*(ByteFallback ?)?(Fuse( Strip)*)?", kinds or "none"):
        return UnknownRule(tokenizer) if strips_ends else TokenwiseRule(tokenizer)
    return UnknownRule(tokenizer)
