"""UnknownRule: any other decoder (WordPiece, CTC ...), treated as a black box."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from engine.text.stop.automaton import StopAutomaton
from engine.text.stop.search import TextSearch
from engine.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_HELD_TOKENS = 8
_WINDOW_TOKENS = 16


class UnknownRule:
    """Holds back U+FFFD at the end, of the last tokens only.

    Assumes that a token's text depends only on the tokens of the window.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def delta(
        self, window_ids: Sequence[int], new_ids: Sequence[int], final: bool, skip: bool
    ) -> str:
        before = self._final_text(window_ids, skip)
        ids = [*window_ids, *new_ids]
        after = self._tokenizer.decode(ids, skip) if final else self._final_text(ids, skip)
        return after[len(before) :]

    def window(self, ids: Sequence[int], skip: bool) -> list[int]:
        visible = self._visible_from_the_end(ids, skip)
        window = list(islice(visible, _WINDOW_TOKENS))[::-1]
        if not self._tokenizer.decode(window, skip):
            window = [*islice(filter(self._tokenizer.token_text, visible), 1), *window]
        return window

    def prompt_window(self, ids: Sequence[int], skip: bool) -> list[int]:
        return self.window(ids, skip)

    def opens(self, token_id: int, skip: bool) -> bool:
        return False

    def whole_text(self, token_id: int) -> bytes | None:
        return None

    def raw_bytes(self, token_id: int) -> bytes | None:
        return None

    def scanner(
        self, automaton: StopAutomaton, window_ids: Sequence[int], skip: bool
    ) -> _DecodingScanner:
        return _DecodingScanner(automaton, self, window_ids, skip)

    def is_visible(self, token_id: int, skip: bool) -> bool:
        """Whether the token takes part in decoding."""
        return self._tokenizer.is_visible(token_id, skip)

    def _final_text(self, ids: Sequence[int], skip: bool) -> str:
        """Return the text of `ids` without the end that later tokens could still change."""
        text = self._tokenizer.decode(ids, skip)
        final = text.rstrip(_REPLACEMENT)
        if len(final) == len(text):
            return text
        visible = list(self._visible_from_the_end(ids, skip))[::-1]
        older = self._tokenizer.decode(visible[:-_HELD_TOKENS], skip)
        return text[: max(len(final), len(older))]

    def _visible_from_the_end(self, ids: Sequence[int], skip: bool) -> Iterator[int]:
        return (
            token_id for token_id in reversed(ids) if self._tokenizer.is_visible(token_id, skip)
        )


class _DecodingScanner:
    """Decodes each token with a window of those before it."""

    is_open = True

    def __init__(
        self, automaton: StopAutomaton, rule: UnknownRule, window_ids: Sequence[int], skip: bool
    ) -> None:
        self._rule = rule
        self._window_ids = list(window_ids)
        self._skip = skip
        self.search = TextSearch(automaton, prompt_text=rule.delta(window_ids, [], True, skip))

    def append(self, token_id: int) -> None:
        if self._rule.is_visible(token_id, self._skip):
            self.search.feed(self._rule.delta(self._window_ids, [token_id], False, self._skip))
            self._window_ids = self._rule.window([*self._window_ids, token_id], self._skip)

    def finish(self) -> None:
        self.search.feed(self._rule.delta(self._window_ids, [], True, self._skip))
        self._window_ids = []
