"""Detokenizer: incremental decoding of new tokens to text, stateless between calls."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from engine.protocol import OutputDetails, SequenceOutput
from engine.text.tokenizer import Tokenizer
from engine.text.visible_text import TextRule, text_rule


class Detokenizer:
    """Decodes chunks of token ids to pieces of text, given a window of the ids before each.

    With windows from `prompt_window` and `next_window`, the pieces join to the same text however a
    sequence is cut into chunks; after an empty prompt that is `Tokenizer.decode` of the whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._rule = text_rule(tokenizer)

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
        before = self._rule.final_text(window_ids, skip_special_tokens)
        ids = [*window_ids, *new_ids]
        if final:
            after = self.tokenizer.decode(ids, skip_special_tokens)
        else:
            after = self._rule.final_text(ids, skip_special_tokens)
        return after[len(before) :]

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

        It is a few tokens long, plus an open run of byte-fallback tokens.
        """
        return self._rule.window([*window_ids, *new_ids], skip_special_tokens)

    def prompt_window(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> list[int]:
        """Return the few last ids of a prompt that are needed to decode its output.

        All their text is final, except a character that the prompt leaves incomplete.
        """
        return self._rule.prompt_window(prompt_ids, skip_special_tokens)

    def incremental(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> IncrementalDecoder:
        """Return a decoder of the output after a prompt, or after its `prompt_window`."""
        return IncrementalDecoder(self, self._rule, prompt_ids, skip_special_tokens)


class IncrementalDecoder:
    """Decodes one growing sequence token by token, and keeps its window.

    The work per token is constant on average (amortised), whatever the tokens are: an open run of
    byte-fallback tokens is decoded once, when it ends.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        rule: TextRule,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool,
    ) -> None:
        self._detokenizer = detokenizer
        self._rule = rule
        self._skip_special_tokens = skip_special_tokens
        self._window_ids = rule.prompt_window(prompt_ids, skip_special_tokens)
        self._pending_ids: list[int] = []  # after the window, without final text yet
        self._open_bytes = rule.open_bytes(self._window_ids)

    def fork(self) -> IncrementalDecoder:
        """Return a decoder of another sequence with the same tokens so far."""
        fork = copy(self)
        fork._pending_ids = list(self._pending_ids)
        return fork

    def append(self, token_id: int) -> str:
        """Add an output token; return the text that it makes final."""
        skip = self._skip_special_tokens
        if not self._detokenizer.tokenizer.is_visible(token_id, skip):
            return ""
        self._pending_ids.append(token_id)
        if self._open_bytes is not None:
            self._open_bytes = self._rule.still_open(self._open_bytes, token_id)
            if self._open_bytes is not None:
                return ""
        window, new = self._window_ids, self._pending_ids
        piece = self._detokenizer.delta(window, new, final=False, skip_special_tokens=skip)
        self._window_ids = self._rule.window([*window, *new], skip)
        self._pending_ids = []
        self._open_bytes = self._rule.open_bytes(self._window_ids)
        return piece

    def held_text(self) -> str:
        """Return the text held back, as it is decoded if the sequence ends here."""
        return self._detokenizer.delta(
            self._window_ids,
            self._pending_ids,
            final=True,
            skip_special_tokens=self._skip_special_tokens,
        )
