"""The sampler through our kernels, for logits on a GPU.

The host lays out what the requests ask for; nothing of the vocabulary's size leaves the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.execution.logits_processors import has_penalties, mask_logits
from engine.request import Request, SampledToken
from engine.service.messages import TokenLogprobs
from kernels.sampling.adjust_logits import LogitBias, Penalties, adjust_logits
from kernels.sampling.draw import sample_tokens
from kernels.sampling.logprobs import token_logprobs
from kernels.sampling.token_counts import TokenCounts, count_output, mark_prompt

# Beyond these, float32 has 0 and infinity.
_COLDEST, _HOTTEST = 1e-37, 1e37


def sample_on_device(logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
    """Do what `engine.execution.sampler.sample` does, for logits that Triton can read."""
    with_logprobs = [i for i, r in enumerate(requests) if r.sampling_params.logprobs is not None]
    raw = logits[with_logprobs] if with_logprobs else None
    mask_logits(logits, requests)
    _adjust(logits, requests)
    token_ids = _draw(logits, requests)
    sampled = [SampledToken(token_id, 0.0) for token_id in token_ids.tolist()]
    if raw is not None:
        asked = [requests[i] for i in with_logprobs]
        found = _logprobs(raw, token_ids[with_logprobs], asked)
        for i, logprobs in zip(with_logprobs, found, strict=True):
            sampled[i] = SampledToken(logprobs.token_ids[0], logprobs.logprobs[0], logprobs)
    return sampled


def _adjust(logits: Tensor, requests: Sequence[Request]) -> None:
    params = [r.sampling_params for r in requests]
    penalised = [has_penalties(p) for p in params]
    if not any(penalised) and not any(p.logit_bias for p in params):
        return
    where = logits.device
    biases = [sorted((p.logit_bias or {}).items()) for p in params]
    bias = LogitBias(
        start_loc=_tensor([0, *accumulate(map(len, biases))], torch.int32, where),
        token_ids=_tensor([token for row in biases for token, _ in row], torch.int32, where),
        values=_tensor([value for row in biases for _, value in row], torch.float32, where),
    )
    slots = [slot if has else -1 for slot, has in zip(_numbers(penalised), penalised, strict=True)]
    penalties = Penalties(
        slots=_tensor(slots, torch.int32, where),
        repetition=_tensor([p.repetition_penalty for p in params], torch.float32, where),
        presence=_tensor([p.presence_penalty for p in params], torch.float32, where),
        frequency=_tensor([p.frequency_penalty for p in params], torch.float32, where),
    )
    speakers = [r for r, has in zip(requests, penalised, strict=True) if has]
    adjust_logits(logits, bias, penalties, _count(speakers, logits.shape[1], where))


def _numbers(flags: Sequence[bool]) -> list[int]:
    """Return for each flag how many are set before it."""
    return list(accumulate(flags[:-1], initial=0))


def _count(speakers: Sequence[Request], vocab: int, where: torch.device) -> TokenCounts:
    """Return what each of the speakers has said, in slots of their order."""
    counts = TokenCounts.allocate(max(len(speakers), 1), vocab, where)
    prompts = [r.token_ids[: r.num_prompt_tokens] for r in speakers]
    outputs = [r.token_ids[r.num_prompt_tokens :] for r in speakers]
    mark_prompt(
        counts,
        _tensor(range(len(speakers)), torch.int32, where),
        _tensor([0, *accumulate(map(len, prompts))], torch.int32, where),
        _tensor([token for prompt in prompts for token in prompt], torch.int32, where),
    )
    count_output(
        counts,
        _tensor([slot for slot, output in enumerate(outputs) for _ in output], torch.int32, where),
        _tensor([token for output in outputs for token in output], torch.int32, where),
    )
    return counts


def _draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    where = logits.device
    params = [r.sampling_params for r in requests]
    heat = [min(max(p.temperature, _COLDEST), _HOTTEST) if p.temperature else 0.0 for p in params]
    seeds = np.array([r.seed for r in requests], dtype=np.uint64).view(np.int64)
    return sample_tokens(
        logits,
        _tensor(heat, torch.float32, where),
        _tensor([p.top_k for p in params], torch.int32, where),
        _tensor([p.top_p for p in params], torch.float32, where),
        _tensor([p.min_p for p in params], torch.float32, where),
        torch.from_numpy(seeds).to(where, non_blocking=True),
        _tensor([r.num_output_tokens for r in requests], torch.int64, where),
    )


def _logprobs(raw: Tensor, token_ids: Tensor, requests: Sequence[Request]) -> list[TokenLogprobs]:
    """Return for each row the chosen token, then as many of the most likely as were asked for."""
    wanted = [min(r.sampling_params.logprobs or 0, raw.shape[1]) for r in requests]
    chosen, ranks, top_ids, top_logprobs = token_logprobs(raw, token_ids, max(wanted))
    rows = zip(
        token_ids.tolist(),
        chosen.tolist(),
        ranks.tolist(),
        top_ids.tolist(),
        top_logprobs.tolist(),
        wanted,
        strict=True,
    )
    return [
        TokenLogprobs(
            token_ids=[token_id, *ids[:num_top]],
            logprobs=[logprob, *logprobs[:num_top]],
            ranks=[rank, *range(1, num_top + 1)],
        )
        for token_id, logprob, rank, ids, logprobs, num_top in rows
    ]


def _tensor(values: Sequence[float], dtype: torch.dtype, where: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(where, non_blocking=True)
