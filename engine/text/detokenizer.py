"""Detokenizer: the text that new tokens add, without keeping anything between calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from engine.text.tokenizer import Tokenizer
from engine.text.visible_text import text_rule

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_PROMPT_WINDOW = 256  # tokens
_MAX_BYTES_OF_CHARACTER = 4


class Detokenizer:
    """Turns chunks of token ids into pieces of text, given a window of the ids before each.

    However a sequence is cut into chunks, with windows from `window_start`, its pieces join to
    the same text; after an empty prompt that is `Tokenizer.decode` of the whole sequence.
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

    def window_start(
        self, ids: Sequence[int], end: int, *, skip_special_tokens: bool = True
    ) -> int:
        """Return where the window `ids[start:end]` begins that suffices for all text after `end`.

        `ids` are prompt and output. The window is a few tokens long, but for tokens without
        text and runs of byte-fallback tokens, which it spans.
        """
        assert 0 <= end <= len(ids)
        return self._rule.window_start(ids, end, skip_special_tokens)

    def prompt_window(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> list[int]:
        """Return the end of a prompt that the text of its output may depend on.

        A run of special or byte tokens that ends the prompt is decoded with every piece of the
        output, so of a long one only the last whole characters count.
        """
        end = len(prompt_ids)
        start = self.window_start(prompt_ids, end, skip_special_tokens=skip_special_tokens)
        if end - start > _MAX_PROMPT_WINDOW:
            start = end - _MAX_PROMPT_WINDOW
            # One incomplete character spoils a run of bytes, and both ends may be inside one.
            for first, last in product(range(_MAX_BYTES_OF_CHARACTER), repeat=2):
                ids = prompt_ids[start + first : end - last]
                if not self.tokenizer.decode(ids, skip_special_tokens).startswith(_REPLACEMENT):
                    start += first
                    break
        return list(prompt_ids[start:])


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
        ids = [*self._window_ids, *token_ids]
        start = self._detokenizer.window_start(
            ids, len(ids), skip_special_tokens=self._skip_special_tokens
        )
        self._window_ids = ids[start:]
        return piece

    def finish(self) -> str:
        """End the sequence; return the text that was held back. Call it once, last."""
        return self._detokenizer.delta(
            self._window_ids, [], final=True, skip_special_tokens=self._skip_special_tokens
        )
