"""TextSearch: the search for stop strings in the text of one sequence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from operator import eq
from typing import Protocol

from engine.text.stop.automaton import StopAutomaton, StopMatch


class TextSearch:
    """A search for stop strings in a text that comes in pieces.

    Attributes:
        state: of the automaton.
        length: characters of text so far.
        match: the first stop string found.
        is_beginning: the start of the text still needs care (see `__init__`).
    """

    def __init__(
        self,
        automaton: StopAutomaton,
        *,
        prompt_text: str = "",
        raw: str = "",
        strip: Callable[[str], str] | None = None,
    ) -> None:
        """Start at the beginning of the output.

        Args:
            prompt_text: of the prompt alone (U+FFFD for a character that it left incomplete). It is
                part of the text but not searched, so that each match has an output token.
            raw: text before the output that `strip` leaves nothing of.
            strip: takes off what a decoder drops at the start; None: nothing, or that is over.
        """
        self._automaton = automaton
        self._known = prompt_text
        self._raw = raw
        self._strip = strip
        self.is_beginning = bool(prompt_text) or strip is not None
        self.state = 0
        self.length = 0
        self.match: StopMatch | None = None

    def copy(self) -> TextSearch:
        """Return an independent search of another text with the same start."""
        search = TextSearch.__new__(TextSearch)
        vars(search).update(vars(self))
        return search

    def feed(self, text: str) -> None:
        """Add a piece of text."""
        if self.is_beginning:
            text = self._begin(text)
        self.state, match = self._automaton.advance(self.state, text)
        if match is not None and self.match is None:
            self.match = match._replace(
                start=self.length + match.start, end=self.length + match.end
            )
        self.length += len(text)

    def _begin(self, text: str) -> str:
        """Return the part of `text` to be searched; count what is text but not searched."""
        if self._strip is not None:
            self._raw += text
            text = self._strip(self._raw)
            if text:
                self._strip = None
        skipped = sum(1 for _ in takewhile(bool, map(eq, text, self._known)))
        # Text that differs, and all after it, depends on output tokens.
        self._known = self._known[skipped:] if skipped == len(text) else ""
        self.is_beginning = bool(self._known) or self._strip is not None
        self.length += skipped
        return text[skipped:]


class TokenScanner(Protocol):
    """Feeds the text of the tokens of one sequence to a search, in constant time per token.

    Attributes:
        search: over the text that can no longer change.
    """

    search: TextSearch

    @property
    def is_open(self) -> bool:
        """Whether the text of the next token depends on more than the token."""

    def append(self, token_id: int) -> None:
        """Add an output token."""

    def finish(self) -> None:
        """End the sequence: no text is held back any more."""
