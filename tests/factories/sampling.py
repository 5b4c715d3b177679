"""The sampler on a batch of requests: admit, plan, sample and read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.core.request import Request, SampledToken
from engine.execution.sampling.sampler import SamplePlan, Sampler


def sample_requests(logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
    """Return a token of each request, from a new sampler."""
    sampler = Sampler(len(requests), logits.shape[1], logits.device)
    slots = range(len(requests))
    for slot, request in zip(slots, requests, strict=True):
        sampler.admit(slot, request)
    return run_plan(sampler, make_plan(sampler, slots, requests), logits, slots)


def make_plan(
    sampler: Sampler, slots: Sequence[int], requests: Sequence[Request], *, ahead: int = 0
) -> SamplePlan:
    """Plan a token for each request in `slots`, with `ahead` tokens not read yet."""
    counts = [request.num_output_tokens + ahead for request in requests]
    return sampler.plan(np.array(slots, dtype=np.int32), np.array(counts, dtype=np.int64), requests)


@torch.inference_mode()
def run_plan(
    sampler: Sampler, plan: SamplePlan, logits: Tensor, slots: Sequence[int]
) -> list[SampledToken]:
    """Sample and read; a slot of -1 has ended."""
    where = torch.tensor(slots, dtype=torch.int32, device=logits.device)
    samples = sampler.sample(plan, logits, where).to_host()
    if logits.is_cuda:
        torch.cuda.synchronize()
    return plan.read(samples)
