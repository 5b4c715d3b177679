"""StopAutomaton: all stop strings of a request searched at once, piece of text by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from engine.text.byte_sets import ByteSets, byte_set

_MAX_TRANSITIONS = 4096  # remembered per automaton, about 1 MB


class StopMatch(NamedTuple):
    """A stop string and its position in the text, in characters."""

    stop: str
    start: int
    end: int


class StopAutomaton:
    """Finds stop strings in a text that comes piece by piece.

    The automaton of Aho and Corasick ("Efficient string matching", 1975): one step per character,
    however many strings there are. A state is the longest suffix of the text that is a prefix of a
    stop string. There is up to one state per character of all strings. Sequences with the same
    strings share it, and with it the transitions by whole tokens, each of which is computed once.

    Attributes:
        found: per state, the longest stop string that the text now ends with, or None.
        held: per state, how many of the last characters could still become a stop string.
        first_bytes: a `byte_set`. A text of whole characters that has none of these bytes leaves
            the automaton in its initial state, without a match. Empty without stop strings.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        words = [word for word in stop if word]
        self._next: list[dict[str, int]] = [{}]
        self.found: list[str | None] = [None]
        depth = [0]
        for word in words:
            state = 0
            for character in word:
                if character not in self._next[state]:
                    self._next[state][character] = len(depth)
                    self._next.append({})
                    self.found.append(None)
                    depth.append(depth[state] + 1)
                state = self._next[state][character]
            self.found[state] = word
        self._fallback = [0] * len(depth)
        self.held = [0] * len(depth)
        queue = deque([0])
        while queue:  # breadth first: the fallback of a state is complete before the state
            state = queue.popleft()
            fallback = self._fallback[state]
            self.found[state] = self.found[state] or self.found[fallback]
            self.held[state] = depth[state] if self._next[state] else self.held[fallback]
            for character, child in self._next[state].items():
                self._fallback[child] = self.step(fallback, character) if state else 0
                queue.append(child)
        # The last byte of a character is more selective than the first, which a whole script
        # shares.
        self.first_bytes: ByteSets = byte_set(
            character.encode("utf-8", "surrogatepass")[-1] for character in self._next[0]
        )
        self._transitions: dict[tuple[int, str], tuple[int, StopMatch | None]] = {}

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character; 0 is the initial state."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def advance(self, state: int, text: str) -> tuple[int, StopMatch | None]:
        """Return the state after `text`, and the first match in it, or None.

        The match that ends first counts; among those that end together, the one that starts first.
        Its position counts from the start of `text`; it may start before. One lookup for a text
        that was seen in this state before.
        """
        known = self._transitions.get((state, text))
        if known is None:
            known = self._walk(state, text)
            if len(self._transitions) >= _MAX_TRANSITIONS:
                self._transitions.clear()
            self._transitions[state, text] = known
        return known

    def _walk(self, state: int, text: str) -> tuple[int, StopMatch | None]:
        match = None
        for end, character in enumerate(text, start=1):
            state = self.step(state, character)
            stop = self.found[state]
            if stop is not None and match is None:
                match = StopMatch(stop, end - len(stop), end)
        return state, match
