"""What requests ask to be done to their logits before a token is chosen from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import Request
from engine.sampling_params import SamplingParams

_LARGEST = torch.finfo(torch.float32).max


def process_logits(logits: Tensor, requests: Sequence[Request]) -> None:
    """Apply masks, biases and penalties in place to `logits`, fp32 [R, vocab], a row a request."""
    mask_logits(logits, requests)
    for row, request in zip(logits, requests, strict=True):
        params = request.sampling_params
        if params.logit_bias:
            ids, bias = zip(*params.logit_bias.items(), strict=True)
            row[list(ids)] += row.new_tensor(bias)
        if has_penalties(params):
            _penalise(row, request)
        if params.logit_bias or params.repetition_penalty != 1.0:
            # Extreme ones overflow; an infinite maximum would make the whole row NaN.
            row.nan_to_num_(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)


def mask_logits(logits: Tensor, requests: Sequence[Request]) -> None:
    """Forbid in place what the requests do not allow to come next."""
    for row, request in zip(logits, requests, strict=True):
        params = request.sampling_params
        if params.allowed_token_ids is not None:
            _allow_only(row, torch.from_numpy(request.allowed_token_ids).to(row.device))
        if request.bad_words:
            _forbid(row, _ends_of_bad_words(request))
        if request.num_output_tokens < params.min_tokens:
            _forbid(row, list(request.stop_token_ids))


def has_penalties(params: SamplingParams) -> bool:
    """Tell whether what has been said changes what comes next."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _allow_only(row: Tensor, token_ids: Tensor) -> None:
    allowed = row[token_ids]
    row.fill_(-torch.inf)
    row[token_ids] = allowed


def _forbid(row: Tensor, token_ids: Sequence[int]) -> None:
    """Forbid tokens, unless that leaves none: some token has to come."""
    if not token_ids:
        return
    before = row[token_ids]
    row[token_ids] = -torch.inf
    if row.amax() == -torch.inf:
        row[token_ids] = before


def _ends_of_bad_words(request: Request) -> list[int]:
    """Return the last token of each bad word whose other tokens have just been produced."""
    output = request.token_ids[request.num_prompt_tokens :]
    return [last for *head, last in request.bad_words if not head or output[-len(head) :] == head]


def _penalise(row: Tensor, request: Request) -> None:
    """Repetition looks at prompt and output, presence and frequency at the output alone."""
    params = request.sampling_params
    tokens = torch.tensor(request.token_ids, device=row.device)
    if params.repetition_penalty != 1.0:
        seen = torch.unique(tokens)
        value, penalty = row[seen], params.repetition_penalty
        row[seen] = torch.where(value > 0, value / penalty, value * penalty)
    output, counts = torch.unique(tokens[request.num_prompt_tokens :], return_counts=True)
    row[output] -= params.frequency_penalty * counts + params.presence_penalty
