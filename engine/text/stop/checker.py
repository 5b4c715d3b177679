"""StopChecker: ends a sequence at a stop string, and holds back tokens that may become one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.text.byte_sets import ALL_BYTES, ByteSets
from engine.text.detokenizer import Detokenizer
from engine.text.stop.automaton import StopAutomaton, StopMatch


class StopChecker:
    """Watches the output of one sequence for stop strings.

    The match that ends first counts; among those that end together, the one that starts first.
    Text that comes from the prompt alone (U+FFFD for a character that it left incomplete) is part
    of the output's text but not searched, so that there is no match without an output token.

    A token costs a few dictionary lookups, whatever its text. Most tokens need no call at all:
    with `watch` as a row of an array `watched`, of shape [sequences, 4], and zeros for a sequence
    without stop strings,

        visit = (token_flags.byte_sets[token_ids] & watched[slots]).any(axis=1)

    returns which tokens of a step to `append`. The others may be left out, if `skip` counts them
    before the next one is appended:

        checker.skip(num_output_tokens - 1 - checker.num_tokens)
        checker.append(token_id)
        watched[slot] = checker.watch

    Attributes:
        match: the match that ended the sequence, or None. Its position counts from the first token
            that was appended.
        num_tokens: output tokens appended or skipped.
        num_held_tokens: of the last tokens, how many must not be released yet, because their text
            may be cut. Stays 0 while tokens are left out.
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
        self.num_tokens = 0
        self.num_held_tokens = 0
        self._automaton = stop
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str_in_output
        self._scanner = detokenizer.scanner(
            stop, prompt_ids, skip_special_tokens=skip_special_tokens
        )
        self._held: deque[tuple[int, int]] = (
            deque()
        )  # length of the text, and tokens that end there

    @property
    def watch(self) -> ByteSets:
        """The next token must be appended if its `TokenFlags.byte_sets` has one of these bytes."""
        search = self._scanner.search
        if search.state or search.is_beginning or self._scanner.is_open:
            return ALL_BYTES
        return self._automaton.first_bytes

    def skip(self, num_tokens: int) -> None:
        """Count tokens that `watch` allowed to leave out."""
        self.num_tokens += num_tokens

    def append(self, token_id: int) -> None:
        """Add one output token; set `match` if it completes a stop string: the sequence has ended.

        All tokens that were held then belong to the final chunk.
        """
        assert self.match is None
        self.num_tokens += 1
        self._scanner.append(token_id)
        self.num_held_tokens += 1
        if not self._has_match():
            self._release()

    def finish(self) -> int:
        """End the sequence; return how many characters to drop from the end of its text.

        The final chunk holds all tokens not released before (possibly none) and all text that was
        held back. Such text may complete a stop string too: then `match` is set by this call.
        """
        self._scanner.finish()
        if self.match is None and not self._has_match():
            return 0
        assert self.match is not None
        kept = self.match.end if self._include_stop else self.match.start
        return self._scanner.search.length - kept

    def _has_match(self) -> bool:
        """Whether the newest text completes a stop string that counts."""
        search = self._scanner.search
        if self.num_tokens >= self._min_tokens:
            self.match = search.match
        search.match = None
        return self.match is not None

    def _release(self) -> None:
        """Stop holding the tokens whose text can no longer become a stop string."""
        search, held = self._scanner.search, self._held
        num_characters = 0 if self._include_stop else self._automaton.held[search.state]
        if num_characters == 0:
            held.clear()
            self.num_held_tokens = 0
            return
        same = held.pop()[1] if held and held[-1][0] == search.length else 0
        held.append((search.length, same + 1))
        while held[0][0] <= search.length - num_characters:
            self.num_held_tokens -= held.popleft()[1]
