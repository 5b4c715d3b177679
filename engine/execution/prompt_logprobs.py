"""Log-probabilities of prompt tokens, from the hidden states of the tokens before them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.core.logprobs.scored_tokens import ScoredTokens
from kernels.sampling.logprobs import Logprobs, token_logprobs
from kernels.step.upload import upload_together


def score_tokens(
    scored: ScoredTokens,
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    *,
    max_rows: int,
) -> list[Tensor]:
    """Return the columns of `ScoredLogprobs`, on the device, without waiting for it.

    Args:
        hidden: [T, hidden_size], of the tokens of the step in the order of its rows.
        compute_logits: float32 [R, V] of R hidden states.
        max_rows: the logits of no more places exist at any time.
    """
    columns = upload_together((scored.places, scored.token_ids), hidden.device)
    places, token_ids = (torch.split(column, max_rows) for column in columns)

    def find(places: Tensor, token_ids: Tensor) -> Logprobs:
        logits = compute_logits(hidden.index_select(0, places))
        return token_logprobs(logits, token_ids.long(), min(scored.num_top, logits.shape[1]))

    found = map(find, places, token_ids)
    chosen, ranks, top_token_ids, top_logprobs = map(torch.cat, zip(*found, strict=True))
    return [chosen, ranks, top_token_ids.int(), top_logprobs]
