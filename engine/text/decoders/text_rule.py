"""TextRule: how the decoder of a tokenizer makes text of tokens, so that it can be done in parts.

Decoding is not token by token: characters are split over tokens, and the start of a text is
treated specially. There is a rule for each kind of decoder, so that `Detokenizer` is exact with a
short window of ids in place of all previous ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.text.stop.automaton import StopAutomaton
from engine.text.stop.search import TokenScanner


class TextRule(Protocol):
    """How the decoder of a tokenizer treats the start and the end of a text."""

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
