"""SequenceGrammar: where one sequence is in its grammar, and the masks of those of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from engine.errors import RequestError
from engine.text.grammar.spec import GrammarTextError
from engine.text.grammar.trial import described, forced_tokens

_WORD_BITS = 32
_LONG_RUN = 512  # bytes; a mask takes 1 ms for a thousand of them, at each of their tokens


class SequenceGrammar:
    """The grammar of one sequence, after the output tokens so far."""

    def __init__(self, start: LLMatcher, num_ids: int) -> None:
        """Begin at `start`, which is not changed; `num_ids` is that of its `Vocabulary`."""
        self.matcher = start.deep_copy()
        self.num_ids = num_ids
        self.fault: Exception | None = None  # of the masks, raised with the next token
        self._run: deque[int] = deque()  # the next tokens, where they are known to be many

    def take(self, token_id: int) -> bool:
        """Go on with an output token; return whether nothing may follow it.

        Raises:
            RequestError: the grammar does not allow it, because nothing that it allows could be
                chosen, or a limit was reached.
            Exception: the mask could not be computed.
        """
        if self.fault is not None:
            raise self.fault
        if self.matcher.is_error():
            raise _cannot_follow(described(self.matcher.get_error()))
        if not self.matcher.consume_token(token_id):
            raise _cannot_follow("no token of it is left, with what else the request allows")
        if self._run and self._run.popleft() != token_id:
            self._run.clear()
        return bool(self.matcher.is_stopped())

    def forced(self) -> list[int]:
        """Return the only tokens that can follow, as many as are known; they are not taken yet.

        Raises:
            RequestError: they are too many.
        """
        if self._run:
            return [*self._run]
        try:
            return forced_tokens(self.matcher)
        except GrammarTextError as error:
            raise _cannot_follow(str(error)) from None

    def next_of_long_run(self) -> int | None:
        """Return the only token that can follow if it begins a long run of such tokens.

        Its mask has this token alone, and would take long.

        Raises:
            RequestError: they are too many.
        """
        if not self._run and len(self.matcher.compute_ff_bytes()) > _LONG_RUN:
            self._run.extend(self.forced())
        return self._run[0] if self._run else None


def _cannot_follow(reason: str) -> RequestError:
    return RequestError(f"structured_outputs: the grammar cannot be followed: {reason}")


class MaskFiller:
    """Computes which tokens may come next, for all sequences of a step at once.

    In parallel, and without the GIL.
    """

    def __init__(self, vocab_size: int) -> None:
        """Masks are for `vocab_size` logits."""
        self._vocab_size = vocab_size

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    def fill(self, grammars: Sequence[SequenceGrammar]) -> NDArray[np.int32]:
        """Return int32 [N, ceil(vocab_size / 32)]: bit i % 32 of word i // 32 allows token i.

        N is at least 1. No bit is set for a sequence that no token may follow, which can also mean
        that a limit was reached. Never raises: a fault is that of its sequence alone.
        """
        try:
            return self._fill(grammars)
        except Exception as error:
            if len(grammars) > 1:
                return np.concatenate([self.fill([grammar]) for grammar in grammars])
            grammars[0].fault = error
            return np.zeros((1, -(-self._vocab_size // _WORD_BITS)), dtype=np.int32)

    def _fill(self, grammars: Sequence[SequenceGrammar]) -> NDArray[np.int32]:
        num_words = -(-grammars[0].num_ids // _WORD_BITS)
        masks = np.zeros((len(grammars), num_words), dtype=np.int32)
        jobs = []
        for row, grammar in enumerate(grammars):
            token_id = grammar.next_of_long_run()
            if token_id is None:
                jobs.append((grammar.matcher, row))
            else:
                word, bit = divmod(token_id, _WORD_BITS)
                masks.view(np.uint32)[row, word] = 1 << bit
        if jobs:
            self._executor.unsafe_compute_mask_ptr(
                jobs, masks.ctypes.data, masks.strides[0], len(grammars)
            )
        masks = np.ascontiguousarray(masks[:, : -(-self._vocab_size // _WORD_BITS)])
        if rest := self._vocab_size % _WORD_BITS:
            masks[:, -1] &= (1 << rest) - 1
        for row, grammar in enumerate(grammars):
            if grammar.matcher.is_error():
                masks[row] = 0
        return masks
