"""The log-probabilities of the tokens of a step, one by one, from the columns of `Samples`."""

from __future__ import annotations

from engine.core.schedule import Samples
from engine.protocol.messages import TokenLogprobs


def token_logprobs(samples: Samples) -> dict[int, TokenLogprobs]:
    """Return, by row of `samples`, those of the sequences that ask for them."""
    found = samples.logprobs
    if found is None:
        return {}
    columns = zip(
        found.rows.tolist(),
        samples.token_ids[found.rows].tolist(),
        found.logprobs.tolist(),
        found.ranks.tolist(),
        found.num_top.tolist(),
        found.top_token_ids.tolist(),
        found.top_logprobs.tolist(),
        strict=True,
    )
    return {
        row: TokenLogprobs(
            token_ids=[token_id, *top_ids[:num_top]],
            logprobs=[logprob, *top_logprobs[:num_top]],
            ranks=[rank, *range(1, num_top + 1)],
        )
        for row, token_id, logprob, rank, num_top, top_ids, top_logprobs in columns
    }
