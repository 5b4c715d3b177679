"""The sampler on a batch of requests: admit, plan, sample and read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.core.constraints.sampling_constraints import SamplingConstraints
from engine.core.request import Request
from engine.core.schedule import MAX_STOP_TOKEN_IDS, SamplerOutput
from engine.core.schedule_builder import NewRequestDataBuilder, ScheduleBuilder
from engine.core.seq_slots import SeqSlots
from engine.core.update_from_output import token_logprobs
from engine.execution.downloads import Downloads
from engine.execution.pending_step import PendingStep
from engine.execution.sampler import SamplePlan, Sampler
from engine.execution.slot_writes import write_new_requests
from engine.protocol.messages import TokenLogprobs
from engine.validation.limits import MAX_LOGIT_BIAS
from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.slot_writes import SlotWrites
from kernels.step.token_scatter import scatter_tokens

CPU = torch.device("cpu")

_NONE = np.zeros(0, dtype=np.int32)
_BUILDER = ScheduleBuilder(SeqSlots(1, 1, 1))
_BUILDER.add(_NONE, _NONE)
EMPTY = _BUILDER.build()


class SampledToken(NamedTuple):
    """A token with its log-probability, 0 if the request did not ask for it."""

    token_id: int
    logprob: float
    logprobs: TokenLogprobs | None


def make_tables(
    num_slots: int,
    *,
    max_model_len: int = 64,
    vocab_size: int = 32,
    device: torch.device = CPU,
) -> SeqSlotTables:
    """Return tables for sequences of one block."""
    return SeqSlotTables.allocate(
        num_slots,
        max_model_len=max_model_len,
        max_blocks=1,
        max_stop_token_ids=MAX_STOP_TOKEN_IDS,
        max_biases=MAX_LOGIT_BIAS,
        vocab_size=vocab_size,
        device=device,
    )


def sample_requests(logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
    """Return a token of each request, from a new sampler."""
    max_model_len = max((request.num_tokens for request in requests), default=0) + 1
    tables = make_tables(
        len(requests),
        max_model_len=max_model_len,
        vocab_size=logits.shape[1],
        device=logits.device,
    )
    sampler = Sampler(tables, logits.shape[1])
    slots = range(len(requests))
    _admit(sampler, slots, requests)
    return run_plan(sampler, make_plan(sampler, slots, requests), logits, slots)


def admit(sampler: Sampler, slot: int, request: Request) -> None:
    """Give `slot` to `request`."""
    _admit(sampler, [slot], [request])


def _admit(sampler: Sampler, slots: Sequence[int], requests: Sequence[Request]) -> None:
    new_requests = NewRequestDataBuilder()
    for slot, request in zip(slots, requests, strict=True):
        new_requests.add(request, slot, 0)
    writes = SlotWrites(sampler._tables)
    write_new_requests(new_requests.build(), writes, sampler._tables.allowed_tokens.shape[1])
    writes.apply()
    sampler.admit(new_requests.build())


def make_plan(
    sampler: Sampler, slots: Sequence[int], requests: Sequence[Request], *, ahead: int = 0
) -> SamplePlan:
    """Plan a token for each request in `slots`, with `ahead` tokens not read yet."""
    rows = np.array(slots, dtype=np.int32)
    counts = np.array([r.num_output_tokens + ahead for r in requests], dtype=np.int32)
    wants_token = counts + 1 > ahead if ahead >= 0 else counts > 2**30
    constraints = SamplingConstraints(vocab_size=sampler._vocab_size)
    for slot, request in zip(slots, requests, strict=True):
        constraints.add(slot, request)
    schedule = replace(EMPTY, slots=rows, wants_token=wants_token, num_output_tokens=counts)
    return sampler.plan(schedule, constraints.batch(schedule))


@torch.inference_mode()
def run_plan(
    sampler: Sampler, plan: SamplePlan, logits: Tensor, slots: Sequence[int]
) -> list[SampledToken]:
    """Sample and read; a slot of -1 has ended."""
    where = torch.tensor(slots, dtype=torch.int32, device=logits.device)
    drawn = sampler.sample(plan, logits, where)
    reasons = scatter_tokens(sampler._tables, where, drawn.token_ids)
    sent = PendingStep.of(plan, drawn, reasons, Downloads(logits.device))
    samples = sent.wait()
    found = token_logprobs(samples)
    return [
        SampledToken(token_id, found[row].logprobs[0] if row in found else 0.0, found.get(row))
        for row, token_id in enumerate(samples.token_ids.tolist())
    ]


def samples_of(token_ids: Sequence[int]) -> SamplerOutput:
    """Return samples without log-probabilities that end no sequence."""
    ids = np.array(token_ids, dtype=np.int32)
    return SamplerOutput(ids, 0 * ids, None)
