"""The prompt tokens whose log-probabilities a step computes, and these log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """K prompt tokens of a step, each predicted by the token before it.

    Attributes:
        logits_indices: int32 [K], of the tokens before them, among the tokens of the step in the
            order of its rows.
        token_ids: int32 [K].
        num_top: how many of the most likely tokens to find beside each.
    """

    logits_indices: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    num_top: int


class ScoredLogprobs(NamedTuple):
    """The log-probabilities of the K tokens of `ScoredTokens`.

    Attributes:
        logprobs: float32 [K].
        ranks: int32 [K], 1 is the most likely token.
        top_token_ids: int32 [K, N], the most likely tokens, in order.
        top_logprobs: float32 [K, N].
    """

    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_token_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
