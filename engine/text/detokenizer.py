"""Detokenizer: the text that new tokens add, without keeping anything between calls."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol import Chunk, SequenceOutput
from engine.text.tokenizer import Tokenizer
from engine.text.visible_text import text_rule


class Detokenizer:
    """Turns chunks of token ids into pieces of text, given a window of the ids before each.

    However a sequence is cut into chunks, with windows from `prompt_window` and `window_start`, its
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

    def window_start(
        self, ids: Sequence[int], end: int, *, skip_special_tokens: bool = True
    ) -> int:
        """Return where the window `ids[start:end]` begins that suffices for all text after `end`.

        `ids` are prompt and output. The window is a few tokens long, but for tokens without
        text and runs of byte-fallback tokens, which it spans.
        """
        assert 0 <= end <= len(ids)
        return self._rule.window_start(ids, end, skip_special_tokens)

    def next_window(
        self,
        window_ids: Sequence[int],
        new_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> list[int]:
        """Return the window of what follows `new_ids`, whose own window was `window_ids`."""
        ids = [*window_ids, *new_ids]
        start = self.window_start(ids, len(ids), skip_special_tokens=skip_special_tokens)
        return ids[start:]

    def prompt_window(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> list[int]:
        """Return a few ids that stand for a prompt where its output is decoded.

        All their text is final, but for a character that the prompt leaves incomplete.
        """
        start = self.window_start(
            prompt_ids, len(prompt_ids), skip_special_tokens=skip_special_tokens
        )
        visible = [
            token_id
            for token_id in prompt_ids[start:]
            if self.tokenizer.is_visible(token_id, skip_special_tokens)
        ]
        return self._rule.closed(visible, skip_special_tokens)


class IncrementalDecoder:
    """The text of one growing sequence; it keeps the window itself."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = detokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window_ids = detokenizer.prompt_window(
            prompt_ids, skip_special_tokens=skip_special_tokens
        )

    def append(self, token_ids: Sequence[int]) -> str:
        """Add output tokens; return the text that is final now and was not before."""
        piece = self._detokenizer.delta(
            self._window_ids,
            token_ids,
            final=False,
            skip_special_tokens=self._skip_special_tokens,
        )
        self._window_ids = self._detokenizer.next_window(
            self._window_ids, token_ids, skip_special_tokens=self._skip_special_tokens
        )
        return piece

    def held_text(self) -> str:
        """Return the text that is held back: how it reads if nothing more comes."""
        return self._detokenizer.delta(
            self._window_ids, [], final=True, skip_special_tokens=self._skip_special_tokens
        )
