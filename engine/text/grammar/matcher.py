"""SequenceGrammar: where one sequence is in its grammar, and the masks of those of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from engine.errors import TridentError
from engine.text.grammar.trial import described

_WORD_BITS = 32


class SequenceGrammar:
    """The grammar of one sequence, after the output tokens so far."""

    def __init__(self, start: LLMatcher) -> None:
        """Begin at `start`, which `GrammarCompiler` has made and which is not changed."""
        self.matcher = start.deep_copy()

    def take(self, token_id: int) -> bool:
        """Go on with an output token; return whether nothing may follow it.

        Raises:
            TridentError: the grammar does not allow it, because no token of the vocabulary was
                left or a limit was reached.
        """
        if not self.matcher.consume_token(token_id):
            error = described(self.matcher.get_error())
            raise TridentError(f"structured_outputs: the grammar cannot be followed: {error}")
        return bool(self.matcher.is_stopped())


class MaskFiller:
    """Computes which tokens may come next, for all sequences of a step at once.

    In parallel, and without the GIL.
    """

    def __init__(self, vocab_size: int, num_ids: int) -> None:
        """Masks are for `vocab_size` logits; `num_ids` is that of `Vocabulary`."""
        self._vocab_size = vocab_size
        self._num_words = -(-num_ids // _WORD_BITS)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    def fill(self, grammars: Sequence[SequenceGrammar]) -> NDArray[np.int32]:
        """Return int32 [N, ceil(vocab_size / 32)]: bit i % 32 of word i // 32 allows token i.

        A sequence without an allowed token may get any: `SequenceGrammar.take` then raises.
        """
        masks = np.zeros((len(grammars), self._num_words), dtype=np.int32)
        jobs = [(grammar.matcher, row) for row, grammar in enumerate(grammars)]
        self._executor.unsafe_compute_mask_ptr(
            jobs, masks.ctypes.data, masks.strides[0], len(grammars)
        )
        masks = np.ascontiguousarray(masks[:, : -(-self._vocab_size // _WORD_BITS)])
        if rest := self._vocab_size % _WORD_BITS:
            masks[:, -1] &= (1 << rest) - 1
        masks[~masks.any(axis=1)] = -1
        return masks
