"""Sampler: from the logits of a step to one token per row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.execution.device_sampler import sample_on_device
from engine.execution.logits_processors import process_logits
from engine.request import Request, SampledToken
from engine.service.messages import TokenLogprobs
from kernels import device


def sample(logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
    """Choose the next token of each request from `logits`, fp32 [R, vocab]; may overwrite them.

    A row's token depends on its logits, its parameters, its seed and its number of output tokens
    alone, never on the other rows. Log-probabilities are those before any processing.
    """
    if device.runs_triton(logits):
        return sample_on_device(logits, requests)
    with_logprobs = [i for i, r in enumerate(requests) if r.sampling_params.logprobs is not None]
    raw = torch.log_softmax(logits[with_logprobs], dim=-1) if with_logprobs else None
    process_logits(logits, requests)

    token_ids = logits.argmax(dim=-1)
    drawn = [i for i, r in enumerate(requests) if r.sampling_params.temperature > 0]
    if drawn:
        token_ids[drawn] = _draw(logits[drawn], [requests[i] for i in drawn])

    sampled = [SampledToken(token_id, 0.0) for token_id in token_ids.tolist()]
    if raw is not None:
        for row, i in enumerate(with_logprobs):
            top = requests[i].sampling_params.logprobs
            assert top is not None
            sampled[i] = _with_logprobs(sampled[i].token_id, raw[row], top)
    return sampled


def _draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Draw one token per row by inverting its cumulative distribution at a uniform number."""
    params = [request.sampling_params for request in requests]
    # No temperature is rounded to 0 in float64, and none overflows below a maximum of 0.
    logits = logits.double()
    temperature = logits.new_tensor([p.temperature for p in params])[:, None]
    probs = torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperature, dim=-1)
    uniform = probs.new_tensor([_uniform(request) for request in requests])[:, None]
    if all(p.top_k == 0 and p.top_p == 1 and p.min_p == 0 for p in params):
        return _invert(probs, uniform)

    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    vocab = probs.shape[-1]
    top_k = torch.tensor([[min(p.top_k or vocab, vocab)] for p in params], device=probs.device)
    top_p = probs.new_tensor([[p.top_p] for p in params])
    min_p = probs.new_tensor([[p.min_p] for p in params])
    rank = torch.arange(vocab, device=probs.device)
    probs = probs.masked_fill((rank >= top_k) | (probs < min_p * probs[:, :1]), 0.0)
    # Nucleus: a token stays while the mass before it has not reached top_p of what top-k left.
    mass_before = probs.cumsum(dim=-1) - probs
    outside = (mass_before >= top_p * probs.sum(dim=-1, keepdim=True)) & (top_p < 1)
    # Back in the order of the vocabulary, so that a row draws the same beside unfiltered ones.
    kept = probs.masked_fill(outside, 0.0)
    return _invert(torch.zeros_like(kept).scatter_(1, order, kept), uniform)


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index at which the running sum of `probs` exceeds `uniform` of the total.

    Where there is none, because logits are NaN or all forbidden, the last index: still a token.
    """
    mass = probs.cumsum(dim=-1)
    index = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)[:, 0]
    return index.clamp(max=probs.shape[-1] - 1)


def _uniform(request: Request) -> float:
    """Return a number in [0, 1) from a counter-based generator.

    Philox keyed by the seed, counting output tokens: a preempted or moved sequence goes on with
    the same numbers (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
    """
    philox = np.random.Philox(key=request.seed, counter=request.num_output_tokens)
    return float(np.random.Generator(philox).random())


def _with_logprobs(token_id: int, logprobs: Tensor, num_top: int) -> SampledToken:
    chosen = logprobs[token_id]
    rank = int((logprobs > chosen).sum()) + 1
    top = logprobs.topk(min(num_top, logprobs.shape[-1]))
    return SampledToken(
        token_id,
        float(chosen),
        TokenLogprobs(
            token_ids=[token_id, *top.indices.tolist()],
            logprobs=[float(chosen), *top.values.tolist()],
            ranks=[rank, *range(1, len(top.indices) + 1)],
        ),
    )
