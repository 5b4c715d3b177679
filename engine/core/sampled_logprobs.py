"""The log-probabilities of one token of a step, from the columns of `Samples`."""

from __future__ import annotations

import numpy as np

from engine.core.schedule import Samples
from engine.protocol import TokenLogprobs


def token_logprobs(samples: Samples, row: int) -> TokenLogprobs | None:
    """Return the log-probabilities of token `row`; None if its sequence did not ask for them."""
    found = samples.logprobs
    if found is None:
        return None
    place = int(np.searchsorted(found.rows, row))
    if place == len(found.rows) or found.rows[place] != row:
        return None
    num_top = int(found.num_top[place])
    return TokenLogprobs(
        token_ids=[int(samples.token_ids[row]), *found.top_token_ids[place, :num_top].tolist()],
        logprobs=[float(found.logprobs[place]), *found.top_logprobs[place, :num_top].tolist()],
        ranks=[int(found.ranks[place]), *range(1, num_top + 1)],
    )
