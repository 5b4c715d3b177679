"""The log-probabilities of a prompt as columns of arrays, and position by position."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.protocol.messages import PromptLogprobs, TokenLogprobs
from engine.protocol.token_ids import TokenIds, pack_token_ids, unpack_token_ids

_FLOAT32 = np.dtype("<f4")


def pack(
    token_ids: TokenIds,
    logprobs: NDArray[np.float32],
    ranks: NDArray[np.int32],
    top_token_ids: NDArray[np.int32],
    top_logprobs: NDArray[np.float32],
) -> PromptLogprobs:
    """Return the columns, as they are described there, as a message."""
    return PromptLogprobs(
        token_ids=pack_token_ids(token_ids),
        logprobs=logprobs.astype(_FLOAT32, copy=False).tobytes(),
        ranks=pack_token_ids(ranks),
        top_token_ids=pack_token_ids(top_token_ids),
        top_logprobs=top_logprobs.astype(_FLOAT32, copy=False).tobytes(),
    )


def logprobs_of(message: PromptLogprobs) -> NDArray[np.float32]:
    """Return the log-probability of each token of the prompt but the first."""
    return np.frombuffer(message.logprobs, dtype=_FLOAT32)


def positions(message: PromptLogprobs) -> Iterator[TokenLogprobs]:
    """Yield what is known of each token of the prompt but the first; its own entry comes first."""
    token_ids = unpack_token_ids(message.token_ids)
    shape = len(token_ids), len(message.top_token_ids) // max(1, len(message.token_ids))
    columns = zip(
        token_ids.tolist(),
        logprobs_of(message).tolist(),
        unpack_token_ids(message.ranks).tolist(),
        unpack_token_ids(message.top_token_ids).reshape(shape).tolist(),
        np.frombuffer(message.top_logprobs, dtype=_FLOAT32).reshape(shape).tolist(),
        strict=True,
    )
    top_ranks = range(1, shape[1] + 1)
    for token_id, logprob, rank, top_ids, top_logprobs in columns:
        yield TokenLogprobs([token_id, *top_ids], [logprob, *top_logprobs], [rank, *top_ranks])
