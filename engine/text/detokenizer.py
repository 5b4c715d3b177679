"""Detokenizer: the text that new tokens add, without keeping anything between calls."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from engine.protocol import Chunk, SequenceOutput
from engine.text.tokenizer import Tokenizer
from engine.text.visible_text import TextRule, text_rule


class Detokenizer:
    """Turns chunks of token ids into pieces of text, given a window of the ids before each.

    However a sequence is cut into chunks, with windows from `prompt_window` and `next_window`, its
    pieces join to the same text; after an empty prompt that is `Tokenizer.decode` of the whole.
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

        Text that later tokens could still change (an incomplete character) is kept for the next
        delta, and comes with the last one, which says `final`. `new_ids` may be empty.
        """
        before = self._rule.final_text(window_ids, skip_special_tokens)
        ids = [*window_ids, *new_ids]
        if final:
            after = self.tokenizer.decode(ids, skip_special_tokens)
        else:
            after = self._rule.final_text(ids, skip_special_tokens)
        return after[len(before) :]

    def text(self, chunk: Chunk | SequenceOutput, *, skip_special_tokens: bool = True) -> str:
        """Return the text that `chunk` adds for the client, without what stopped the sequence."""
        token_ids = chunk.token_ids[:-1] if chunk.omit_stop_token else chunk.token_ids
        text = self.delta(
            chunk.window_ids,
            token_ids,
            final=chunk.finish_reason is not None,
            skip_special_tokens=skip_special_tokens,
        )
        return text[: len(text) - chunk.text_cut]

    def next_window(
        self,
        window_ids: Sequence[int],
        new_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> list[int]:
        """Return the window of what follows `new_ids`, whose own window was `window_ids`.

        It is a few tokens long, but for an open run of byte-fallback tokens, which it holds.
        """
        return self._rule.window([*window_ids, *new_ids], skip_special_tokens)

    def prompt_window(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> list[int]:
        """Return a few ids that stand for a prompt where its output is decoded.

        All their text is final, but for a character that the prompt leaves incomplete.
        """
        return self._rule.prompt_window(prompt_ids, skip_special_tokens)

    def incremental(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> IncrementalDecoder:
        """Return a decoder of the output after a prompt, or after its `prompt_window`."""
        return IncrementalDecoder(self, self._rule, prompt_ids, skip_special_tokens)


class IncrementalDecoder:
    """The text of one growing sequence, token by token, on a window that it keeps itself.

    The work for a token is constant in the mean, whatever the tokens are: an open run of
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
        self._pending_ids: list[int] = []  # after the window: they have made no text final
        self._open_bytes = rule.open_bytes(self._window_ids)

    def fork(self) -> IncrementalDecoder:
        """Return a decoder of another sequence with the same tokens so far."""
        fork = copy(self)
        fork._pending_ids = list(self._pending_ids)
        return fork

    def append(self, token_id: int) -> str:
        """Add an output token; return the text that is final now and was not before."""
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
        """Return the text that is held back: how it reads if nothing more comes."""
        return self._detokenizer.delta(
            self._window_ids,
            self._pending_ids,
            final=True,
            skip_special_tokens=self._skip_special_tokens,
        )
