"""Stop strings: searched in the text across token borders; possible beginnings are held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from engine.text.detokenizer import Detokenizer


class StopMatch(NamedTuple):
    """The stop string that ended a sequence, and its place in the output text, in characters."""

    stop: str
    start: int
    end: int


class StopAutomaton:
    """Finds the stop strings of a request in a text that comes piece by piece.

    One step per character, however many strings there are (Aho and Corasick, "Efficient string
    matching", 1975). A state is the longest suffix of the text that is a prefix of a stop string.
    There is up to one state per character of all strings; sequences with the same strings share it.

    Attributes:
        found: per state, the longest stop string that the text now ends with, or None.
        held: per state, how many of the last characters could still become a stop string.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.found: list[str | None] = [None]
        depth = [0]
        for word in stop:
            state = 0
            for character in word:
                if character not in self._next[state]:
                    self._next[state][character] = len(depth)
                    self._next.append({})
                    self.found.append(None)
                    depth.append(depth[state] + 1)
                state = self._next[state][character]
            self.found[state] = word or None
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

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character; 0 is the initial state."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)


class StopChecker:
    """Watches the output of one sequence for stop strings.

    The match that ends first counts; among those that end together, the one that starts first.
    Text that comes from the prompt alone (U+FFFD for a character that it left incomplete) is part
    of the output's text but not searched, so that there is no match without an output token.
    Without stop strings nothing is decoded, and every token may go out at once.

    Attributes:
        match: the match that ended the sequence, or None.
        releasable: number of output tokens whose text can no longer be cut.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        prompt_ids: Sequence[int],
        stop: StopAutomaton,
        *,
        min_tokens: int = 0,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """Start a sequence. A match that completes before `min_tokens` tokens is ignored."""
        self.match: StopMatch | None = None
        self.releasable = 0
        self._automaton = stop
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str_in_output
        self._decoder = (
            detokenizer.incremental(prompt_ids, skip_special_tokens=skip_special_tokens)
            if any(stop.found)
            else None
        )
        self._prompt_text = "" if self._decoder is None else self._decoder.held_text()
        self._state = 0
        self._num_tokens = 0
        self._num_characters = 0
        self._unreleased: deque[int] = deque()  # characters of text after each token held back

    def fork(self) -> StopChecker:
        """Return a checker for another sequence after the same prompt; nothing was appended yet."""
        assert self._num_tokens == 0
        fork = copy(self)
        fork._decoder = self._decoder and self._decoder.fork()
        fork._unreleased = deque()
        return fork

    def append(self, token_id: int) -> None:
        """Add one output token; set `match` if it completes a stop string: the sequence has ended.

        The tokens that are not `releasable` then belong to the final chunk.
        """
        assert self.match is None
        self._num_tokens += 1
        if self._decoder is None:
            self.releasable += 1
            return
        self._search(self._decoder.append(token_id))
        if self.match is None:
            self._unreleased.append(self._num_characters)
            held = 0 if self._include_stop else self._automaton.held[self._state]
            while self._unreleased and self._unreleased[0] <= self._num_characters - held:
                self._unreleased.popleft()
                self.releasable += 1

    def finish(self) -> int:
        """End the sequence; return how many characters to drop from the end of its text.

        The final chunk holds all tokens not released before (possibly none) and all text that was
        held back. Such text may complete a stop string too: then `match` is set by this call.
        """
        if self._decoder is None:
            return 0
        rest = self._decoder.held_text()
        if self.match is None:
            self._search(rest)
        else:
            self._num_characters += len(rest)
        if self.match is None:
            return 0
        kept = self.match.end if self._include_stop else self.match.start
        return self._num_characters - kept

    def _search(self, piece: str) -> None:
        """Feed `piece` of text to the automaton; set `match` at the first stop string."""
        counts = self._num_tokens >= self._min_tokens
        skipped = self._skip_prompt_text(piece)
        for place, character in enumerate(piece[skipped:], self._num_characters + skipped + 1):
            self._state = self._automaton.step(self._state, character)
            stop = self._automaton.found[self._state]
            if stop is not None and counts:
                self.match = StopMatch(stop, place - len(stop), place)
                break
        self._num_characters += len(piece)

    def _skip_prompt_text(self, piece: str) -> int:
        """Return how many characters of `piece` come from the prompt alone."""
        skipped = sum(1 for _ in takewhile(bool, map(eq, piece, self._prompt_text)))
        # Text that differs, and all after it, depends on output tokens.
        self._prompt_text = self._prompt_text[skipped:] if skipped == len(piece) else ""
        return skipped
