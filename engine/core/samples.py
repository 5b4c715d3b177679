"""The tokens of a step one by one, from the columns of `Samples`."""

from __future__ import annotations

from engine.core.request import SampledToken
from engine.core.schedule import SampledLogprobs, Samples
from engine.protocol import TokenLogprobs


def sampled_tokens(samples: Samples) -> list[SampledToken]:
    """Return the tokens of a step with their log-probabilities."""
    token_ids: list[int] = samples.token_ids.tolist()
    tokens = [SampledToken(token_id, 0.0) for token_id in token_ids]
    if samples.logprobs is not None:
        for row, logprobs in _token_logprobs(samples.logprobs, token_ids):
            tokens[row] = SampledToken(token_ids[row], logprobs.logprobs[0], logprobs)
    return tokens


def _token_logprobs(
    found: SampledLogprobs, token_ids: list[int]
) -> list[tuple[int, TokenLogprobs]]:
    columns = zip(
        found.rows.tolist(),
        found.logprobs.tolist(),
        found.ranks.tolist(),
        found.num_top.tolist(),
        found.top_token_ids.tolist(),
        found.top_logprobs.tolist(),
        strict=True,
    )
    return [
        (
            row,
            TokenLogprobs(
                token_ids=[token_ids[row], *top_ids[:num_top]],
                logprobs=[logprob, *top_logprobs[:num_top]],
                ranks=[rank, *range(1, num_top + 1)],
            ),
        )
        for row, logprob, rank, num_top, top_ids, top_logprobs in columns
    ]
