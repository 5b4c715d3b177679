"""PromptScores: the log-probabilities of one prompt, collected step by step."""

from __future__ import annotations

import numpy as np

from engine.core.logprobs.scored_tokens import ScoredLogprobs
from engine.protocol.messages import PromptLogprobs
from engine.protocol.prompt_logprobs import pack
from engine.protocol.token_ids import TokenIds


class PromptScores:
    """The log-probabilities found so far of the tokens of a prompt, all but the first.

    Attributes:
        num_tokens: how many tokens are scored.
        num_top: how many of the most likely tokens are reported beside each.
        num_scheduled: how many have been scored by steps so far, those in flight included.
    """

    def __init__(self, prompt_token_ids: TokenIds, num_top: int) -> None:
        """Begin with nothing found; `num_top` is at most the vocabulary."""
        self._token_ids = prompt_token_ids[1:]
        self.num_tokens = len(self._token_ids)
        self.num_top = num_top
        self.num_scheduled = 0
        self._found = [_nothing(num_top)]
        self._num_found = 0

    @property
    def is_scheduled(self) -> bool:
        """Whether no later step has anything to score."""
        return self.num_scheduled == self.num_tokens

    @property
    def is_complete(self) -> bool:
        """Whether all tokens have been scored by steps that have been read."""
        return self._num_found == self.num_tokens

    def append(self, found: ScoredLogprobs, start: int, stop: int) -> None:
        """Take the rows `start` to `stop` of `found`, those of the next tokens."""
        top = slice(start, stop), slice(self.num_top)
        self._found.append(
            ScoredLogprobs(
                found.logprobs[start:stop],
                found.ranks[start:stop],
                found.top_token_ids[top],
                found.top_logprobs[top],
            )
        )
        self._num_found += stop - start

    def message(self) -> PromptLogprobs:
        """Return what has been found of all tokens as a message."""
        columns = zip(*self._found, strict=True)
        return pack(self._token_ids, *(np.concatenate(column) for column in columns))


def _nothing(num_top: int) -> ScoredLogprobs:
    return ScoredLogprobs(
        np.empty(0, dtype=np.float32),
        np.empty(0, dtype=np.int32),
        np.empty((0, num_top), dtype=np.int32),
        np.empty((0, num_top), dtype=np.float32),
    )
