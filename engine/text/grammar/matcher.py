"""SequenceGrammar: where one sequence is in its grammar, and which tokens may come next."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from engine.errors import RequestError
from engine.text.grammar.host_budget import HostBudget
from engine.text.grammar.spec import GrammarTextError
from engine.text.grammar.trial import described, forced_tokens
from engine.text.grammar.vocabulary import TextEnds

_WORD_BITS = 32
_MAX_AHEAD = 4096  # tokens that are taken before the sequence has them
_NO_TOKEN = 2**31 - 1
_NOTHING_LEFT = "no token is left that both the grammar and the rest of the request allow"


class _Ahead(NamedTuple):
    """A token that the matcher has taken, and the sequence has not.

    Attributes:
        is_over: nothing may follow it.
        is_forced: no other may come; else it was drawn.
    """

    token_id: int
    is_over: bool
    is_forced: bool


class SequenceGrammar:
    """The grammar of one sequence, after the output tokens so far.

    `advance` does what takes time, in any thread, and changes nothing that the sequence sees: it
    takes a drawn token, those that must follow it, and finds the mask after these. `take` has the
    sequence follow. A token that was drawn in vain, because the sequence was preempted before it
    took it, may be followed by a call with another one in its place.

    Attributes:
        budget: of this sequence.
        shared: of all sequences of the same compiled grammar. Their lexer has one lock.
        fault: why no mask could be found, raised with the next token.
    """

    def __init__(
        self,
        start: LLMatcher,
        num_ids: int,
        *,
        budget: HostBudget | None = None,
        shared: HostBudget | None = None,
        text_ends: TextEnds | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Begin at `start`, which is not changed and whose mask has been computed.

        Args:
            start: the compiled grammar.
            num_ids: that of its `Vocabulary`.
            budget: of its kind; None: of a JSON schema.
            shared: None: there are no other sequences.
            text_ends: those of the `Vocabulary`.
            clock: CPU seconds of the calling thread.
        """
        self.matcher = start.deep_copy()
        self.num_ids = num_ids
        self.budget = budget or HostBudget()
        self.shared = shared or HostBudget()
        self.fault: Exception | None = None
        self._clock = clock
        self._text_ends = text_ends
        self._advancing = threading.Lock()
        self._idle: LLMatcher | None = None  # see `_consume`
        self._ahead: deque[_Ahead] = deque()
        self._mask = self._next_mask = self._computed()

    @property
    def is_fast(self) -> bool:
        """Whether a step may wait for `advance`."""
        return self.shared.is_small

    def needs_advance(self, token_id: int) -> bool:
        """Whether `take` of a drawn token has to wait for `advance`."""
        return not (self.fault or (self._ahead and self._ahead[0].token_id == token_id))

    def advance(self, token_id: int, executor: LLExecutor | None = None) -> None:
        """Prepare `take` of a drawn token. Never raises: a fault is that of this sequence.

        Args:
            executor: the matcher takes tokens in its threads, without the interpreter's lock; None:
                here, which is faster for those that take no time.
        """
        with self._advancing:
            if not self.needs_advance(token_id):
                return
            began, taken = self._clock(), list[_Ahead]()
            try:
                self._advance(token_id, taken, executor)
                cpu_s = self._clock() - began
                self.budget.spend(cpu_s)
                self.shared.spend(cpu_s)
                self.budget.check(cpu_s)
            except GrammarTextError as error:
                self.fault = _cannot_follow(str(error))
            except Exception as error:
                self.fault = error
            if self.fault is not None:
                self._next_mask = np.zeros_like(self._mask)
            self._ahead = deque(taken)

    def take(self, token_id: int) -> bool:
        """Go on with an output token; return whether nothing may follow it.

        Raises:
            RequestError: the grammar does not allow it, because nothing that it allows could be
                chosen, or a limit was reached.
            Exception: the mask could not be computed.
        """
        self.advance(token_id)
        if not self._ahead or self._ahead[0].token_id != token_id:
            assert self.fault is not None
            raise self.fault
        taken = self._ahead.popleft()
        if not self._ahead:
            self._mask = self._next_mask
        return taken.is_over

    def check_stop(self, token_id: int) -> None:
        """Check a token that has ended the sequence, and is not taken.

        Raises:
            RequestError: the grammar does not allow it, because it allows nothing that could come.
        """
        if self._ahead and self._ahead[0].is_forced:
            is_allowed = token_id == self._ahead[0].token_id
        else:
            word, bit = divmod(token_id, _WORD_BITS)
            is_allowed = bool(int(self._mask.view(np.uint32)[word]) >> bit & 1)
        if not is_allowed:
            raise self.fault or _cannot_follow(_NOTHING_LEFT)

    def forced(self) -> list[int]:
        """Return the only tokens that can follow, as many as are known; they are not taken yet.

        Raises:
            RequestError: they are too many, or a limit was reached.
        """
        if self._ahead and self._ahead[0].is_forced:
            return [ahead.token_id for ahead in self._ahead]
        if self.fault is not None and not self._ahead:
            raise self.fault
        return []

    def mask(self, vocab_size: int) -> NDArray[np.int32]:
        """Return which tokens may come next: int32 [ceil(vocab_size / 32)].

        Bit i % 32 of word i // 32 allows token i. No bit is set if no token may follow, which can
        also mean that a limit was reached.
        """
        num_words = -(-vocab_size // _WORD_BITS)
        if self._ahead and self._ahead[0].is_forced:
            mask = np.zeros(num_words, dtype=np.int32)
            word, bit = divmod(self._ahead[0].token_id, _WORD_BITS)
            if word < num_words:
                mask.view(np.uint32)[word] = 1 << bit
        else:
            mask = self._mask[:num_words].copy()
        if rest := vocab_size % _WORD_BITS:
            mask[-1] &= (1 << rest) - 1
        return mask

    def _advance(self, token_id: int, taken: list[_Ahead], executor: LLExecutor | None) -> None:
        """Add the token to `taken`, and those that must follow it; find the mask after these."""
        if self._ahead:  # drawn in vain
            self.matcher.rollback(len(self._ahead))
        if self.matcher.is_error():
            raise GrammarTextError(described(self.matcher.get_error()))
        if not self._consume(token_id, executor):
            raise GrammarTextError(_NOTHING_LEFT)
        taken.append(_Ahead(token_id, self.matcher.is_stopped(), is_forced=False))
        if taken[0].is_over:
            return
        # The mask first: it finds what must follow without the interpreter's lock.
        self._next_mask = self._computed()
        for forced in self._forced_tokens():
            if not self._consume(forced, executor):
                raise GrammarTextError(described(self.matcher.get_error()))
            taken.append(_Ahead(forced, self.matcher.is_stopped(), is_forced=True))
        if taken[-1].is_forced and not taken[-1].is_over:
            self._next_mask = self._computed()

    def _computed(self) -> NDArray[np.int32]:
        """Return the mask of all ids after what the matcher has taken."""
        mask = np.zeros(-(-self.num_ids // _WORD_BITS), dtype=np.int32)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self.matcher.is_error():
            mask[:] = 0
        elif self._text_ends is not None:
            self._text_ends.forbid(mask, self.matcher)
        return mask

    def _forced_tokens(self) -> list[int]:
        """Return the only tokens that can follow, up to one that would end the sequence."""
        forced = forced_tokens(self.matcher)[:_MAX_AHEAD]
        if self._text_ends is not None:
            ends = self._text_ends.token_ids
            forced = [*takewhile(lambda token_id: token_id not in ends, forced)]
        return forced

    def _consume(self, token_id: int, executor: LLExecutor | None) -> bool:
        if executor is None:
            return self.matcher.consume_token(token_id)
        # llguidance keeps the interpreter's lock for one matcher, and releases it for two: the
        # second one is in error, and takes nothing.
        if self._idle is None:
            self._idle = self.matcher.deep_copy()
            self._idle.consume_token(_NO_TOKEN)
        return executor.consume_token_par([(self.matcher, token_id), (self._idle, token_id)])[0]


def _cannot_follow(reason: str) -> RequestError:
    return RequestError(f"the grammar cannot be followed: {reason}", param="structured_outputs")
