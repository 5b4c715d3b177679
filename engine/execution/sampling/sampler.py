"""Sampler: from the logits of a step to one token per row.

The host may not have read the tokens of earlier steps. `Sampler.plan` collects the rows' parameters
on the host, `Sampler.sample` runs on the device, and `SamplePlan.read` turns the results into
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.request import Request, SampledToken
from engine.execution.sampling.draw import CpuDraw, Draw, DrawParams, KernelDraw, TorchDraw
from engine.execution.sampling.logits_processors import (
    AllowedTokensMask,
    BadWordsMask,
    BiasAndPenalties,
    Mask,
    MinTokensMask,
    PenaltyAdmissions,
    PenaltyCounts,
    TokenHistory,
)
from engine.execution.sampling.logprobs import Logprobs, LogprobsPlan
from engine.execution.sampling.slot_params import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    LOGPROBS,
    MIN_TOKENS,
    PENALTIES,
    SlotParams,
)
from engine.execution.sampling.step_arrays import StepArrays
from kernels import cpu
from kernels import device as devices


class Samples(NamedTuple):
    """The tokens drawn for R rows; tensors on the device, or on the host."""

    token_ids: Tensor  # int64 [R]
    logprobs: Logprobs | None  # of the rows that ask for them

    def to_host(self) -> Samples:
        """Return a copy in pinned memory, or this one if it is on the host already.

        The copy is asynchronous: record an event after it, and wait for that.
        """
        if self.token_ids.device.type == "cpu":
            return self
        logprobs = self.logprobs and Logprobs(*map(_to_host, self.logprobs))
        return Samples(_to_host(self.token_ids), logprobs)


def _to_host(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How the R rows of a step are sampled. Made by `Sampler.plan`, for one `Sampler.sample`.

    Attributes:
        arrays: all arrays of the plan, uploaded together.
        admissions: sequences with penalties that have taken their slots since the last plan.
        masks: applied in this order.
        adjustment: biases and penalties.
        counts_output: whether any row has penalties, so that its token is counted.
        draw: the draw of the tokens.
        logprobs: of the rows that ask for log-probabilities.
    """

    arrays: StepArrays
    admissions: PenaltyAdmissions | None
    masks: Sequence[Mask]
    adjustment: BiasAndPenalties | None
    counts_output: bool
    draw: Draw
    logprobs: LogprobsPlan | None

    def read(self, samples: Samples) -> list[SampledToken]:
        """Return the token of each row, in order; `samples` are on the host and complete."""
        token_ids: list[int] = samples.token_ids.tolist()
        sampled = [SampledToken(token_id, 0.0) for token_id in token_ids]
        if self.logprobs is not None:
            assert samples.logprobs is not None
            found = self.logprobs.read(samples.logprobs, token_ids)
            for row, logprobs in zip(self.logprobs.rows, found, strict=True):
                sampled[row] = SampledToken(token_ids[row], logprobs.logprobs[0], logprobs)
        return sampled


class Sampler:
    """Chooses tokens for the sequences in the slots of `SlotTables`.

    A row's token depends on its logits, its parameters, its seed and its number of output tokens
    alone, never on the other rows. Log-probabilities are those before any processing.

    `admit` and `plan` run on the host, and read nothing that a step in flight uses. `sample` runs
    on the device: it takes the plans in the order in which they were made, possibly on another
    thread.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Serve up to `num_slots` sequences at a time, whose logits will be on `device`.

        The first sequence with penalties allocates 4 bytes there per slot and vocabulary token.
        """
        self._device = device
        self._has_cpu_kernels = cpu.operations(torch.empty(0, device=device)) is not None
        self._params = SlotParams(num_slots, vocab_size)
        self._admitted: dict[int, TokenHistory] = {}  # since the last plan, those with penalties
        self._penalty_counts = PenaltyCounts(num_slots, vocab_size, device)

    def admit(self, slot: int, request: Request) -> None:
        """Give `slot` to `request`: a new one, or one that resumes after a preemption.

        All its tokens must be known to the host. Replaces the sequence that had the slot before.
        """
        self._params.admit(slot, request)
        self._admitted.pop(slot, None)
        if self._params.features[slot] & PENALTIES:
            self._admitted[slot] = TokenHistory.of(request)

    def plan(
        self,
        slots: NDArray[np.int32],
        num_output_tokens: NDArray[np.int64],
        requests: Sequence[Request],
    ) -> SamplePlan:
        """Plan the sampling of R rows.

        Args:
            slots: [R], each at most once.
            num_output_tokens: [R], output tokens before the one to be drawn: one more than the
                host has read if a step is in flight, but never for a request with `bad_words`.
                Ignored for rows that turn out idle in `sample`. Not copied: the array must not
                change any more.
            requests: the sequence in each of the slots.
        """
        arrays, params = StepArrays(), self._params
        features = params.features[slots]
        used = int(np.bitwise_or.reduce(features))
        admissions = None
        if self._admitted:
            admissions = PenaltyAdmissions.gather(self._admitted, arrays)
            self._admitted = {}
        masks: list[Mask] = []
        if used & (ALLOWED | BAD_WORDS | MIN_TOKENS):
            masks = self._masks(slots, features, num_output_tokens, requests, arrays)
        adjustment = logprobs = None
        if used & (BIAS | PENALTIES):
            biases = [params.bias.get(slot) for slot in slots.tolist()]
            adjustment = BiasAndPenalties(biases, params.penalties(slots), arrays)
        if used & LOGPROBS:
            rows = np.flatnonzero(features & LOGPROBS)
            logprobs = LogprobsPlan(rows, params.num_top_logprobs[slots[rows]], arrays)
        draws = params.draws(slots, num_output_tokens)
        return SamplePlan(
            arrays=arrays,
            admissions=admissions,
            masks=masks,
            adjustment=adjustment,
            counts_output=bool(used & PENALTIES),
            draw=self._draw(draws, arrays),
            logprobs=logprobs,
        )

    def sample(self, plan: SamplePlan, logits: Tensor, slots: Tensor) -> Samples:
        """Sample according to `plan`, without waiting for the device.

        Args:
            plan: the oldest that has not been sampled from.
            logits: float32 [R, V], may be overwritten.
            slots: int32 [R], those of the plan; -1 if the sequence has ended on the device: its
                token is not counted, and undefined.
        """
        arrays = plan.arrays.upload(logits.device)
        if plan.admissions is not None:
            self._penalty_counts.admit(plan.admissions, arrays)
        kept = None if plan.logprobs is None else plan.logprobs.keep(logits, arrays)
        for mask in plan.masks:
            mask.apply(logits, arrays)
        if plan.adjustment is not None:
            plan.adjustment.apply(logits, self._penalty_counts.counts, arrays)
        token_ids = plan.draw.draw(logits, arrays)
        if plan.counts_output:
            self._penalty_counts.count(slots, token_ids)
        if plan.logprobs is None or kept is None:
            return Samples(token_ids, None)
        return Samples(token_ids, plan.logprobs.compute(kept, token_ids, arrays))

    def _draw(self, params: DrawParams, arrays: StepArrays) -> Draw:
        if devices.has_triton(self._device):
            return KernelDraw(params, arrays)
        return CpuDraw(params) if self._has_cpu_kernels else TorchDraw(params)

    def _masks(
        self,
        slots: NDArray[np.int32],
        features: NDArray[np.int32],
        num_output_tokens: NDArray[np.int64],
        requests: Sequence[Request],
        arrays: StepArrays,
    ) -> list[Mask]:
        masks: list[Mask] = []
        params = self._params
        rows = np.flatnonzero(features & ALLOWED)
        if len(rows):
            lists = [params.allowed_token_ids[slot] for slot in slots[rows].tolist()]
            masks.append(AllowedTokensMask(rows, lists, arrays))
        ends = {}
        for row in np.flatnonzero(features & BAD_WORDS).tolist():
            request = requests[row]
            # Fewer in rows that sample no token because they recompute earlier tokens.
            assert num_output_tokens[row] <= request.num_output_tokens
            bad_words = params.bad_words[int(slots[row])]
            if found := bad_words.ends(request.token_ids, request.num_prompt_tokens):
                ends[row] = found
        if ends:
            masks.append(BadWordsMask(ends, arrays))
        too_early = num_output_tokens < params.min_tokens[slots]
        rows = np.flatnonzero((features & MIN_TOKENS != 0) & too_early)
        if len(rows):
            lists = [params.stop_token_ids[slot] for slot in slots[rows].tolist()]
            masks.append(MinTokensMask(rows, lists, arrays))
        return masks
