"""Sampler: from the logits of a step to one token per row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.request import Request
from engine.execution.sampling.adjustment import Adjustment
from engine.execution.sampling.cpu_draw import CpuDraw
from engine.execution.sampling.draw import Draw, DrawParams, KernelDraw
from engine.execution.sampling.logprobs import LogprobsPlan
from engine.execution.sampling.masks import AllowedTokens, BadWordEnds, Mask, StopTokens
from engine.execution.sampling.plan import SamplePlan, Samples
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
from engine.execution.sampling.token_history import Admissions, History, TokenHistory
from engine.execution.sampling.torch_draw import TorchDraw
from kernels import cpu
from kernels import device as devices


class Sampler:
    """Chooses tokens for the sequences in the slots of `SlotTables`.

    A row's token depends on its logits, its parameters, its seed and its number of output tokens
    alone, never on the other rows. Log-probabilities are those before any processing.

    `admit` and `plan` are the host's, and look at nothing that a step in flight uses. `sample` is
    the device's: it takes the plans in the order in which they were made, and may run on another
    thread.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Serve up to `num_slots` sequences at a time, whose logits will be on `device`.

        Once a sequence asks for penalties, 4 bytes are allocated there for each slot and token.
        """
        self._device = device
        self._has_cpu_kernels = cpu.operations(torch.empty(0, device=device)) is not None
        self._params = SlotParams(num_slots, vocab_size)
        self._admitted: dict[int, History] = {}  # since the last plan, those with penalties
        self._history = TokenHistory(num_slots, vocab_size, device)

    def admit(self, slot: int, request: Request) -> None:
        """Give `slot` to `request`: a new one, or one that comes back after a preemption.

        Its tokens must all be known to the host now. Who had the slot before is forgotten.
        """
        self._params.admit(slot, request)
        self._admitted.pop(slot, None)
        if self._params.wishes[slot] & PENALTIES:
            self._admitted[slot] = History.of(request)

    def plan(
        self,
        slots: NDArray[np.int32],
        num_output_tokens: NDArray[np.int64],
        requests: Sequence[Request],
    ) -> SamplePlan:
        """Describe what R rows ask for.

        Args:
            slots: [R], each at most once.
            num_output_tokens: [R], output tokens before the one to be drawn, which may be one more
                than the host has seen. Not so for a request with `bad_words`. Of a row that will
                be idle, which `sample` learns, they mean nothing. Not copied: the array must not
                change any more.
            requests: the sequence in each of the slots.
        """
        arrays, params = StepArrays(), self._params
        wishes = params.wishes[slots]
        wished = int(np.bitwise_or.reduce(wishes))
        admissions = None
        if self._admitted:
            admissions = Admissions.gather(self._admitted, arrays)
            self._admitted = {}
        masks: list[Mask] = []
        if wished & (ALLOWED | BAD_WORDS | MIN_TOKENS):
            masks = self._masks(slots, wishes, num_output_tokens, requests, arrays)
        adjustment = logprobs = None
        if wished & (BIAS | PENALTIES):
            biases = [params.bias.get(slot) for slot in slots.tolist()]
            adjustment = Adjustment(biases, params.penalties(slots), arrays)
        if wished & LOGPROBS:
            rows = np.flatnonzero(wishes & LOGPROBS)
            logprobs = LogprobsPlan(rows, params.num_top_logprobs[slots[rows]], arrays)
        draws = params.draws(slots, num_output_tokens)
        return SamplePlan(
            arrays=arrays,
            admissions=admissions,
            masks=masks,
            adjustment=adjustment,
            counts_output=bool(wished & PENALTIES),
            draw=self._draw(draws, arrays),
            logprobs=logprobs,
        )

    def sample(self, plan: SamplePlan, logits: Tensor, slots: Tensor) -> Samples:
        """Do what `plan` says, without waiting for the device.

        Args:
            plan: the oldest that has not been sampled from.
            logits: float32 [R, V], may be overwritten.
            slots: int32 [R], those of the plan; -1 where the sequence has ended on the device. Then
                nothing is counted for it, and its token means nothing.
        """
        arrays = plan.arrays.upload(logits.device)
        if plan.admissions is not None:
            self._history.admit(plan.admissions, arrays)
        kept = None if plan.logprobs is None else plan.logprobs.keep(logits, arrays)
        for mask in plan.masks:
            mask.apply(logits, arrays)
        if plan.adjustment is not None:
            plan.adjustment.apply(logits, self._history.counts, arrays)
        token_ids = plan.draw.draw(logits, arrays)
        if plan.counts_output:
            self._history.count(slots, token_ids)
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
        wishes: NDArray[np.int32],
        num_output_tokens: NDArray[np.int64],
        requests: Sequence[Request],
        arrays: StepArrays,
    ) -> list[Mask]:
        masks: list[Mask] = []
        params = self._params
        rows = np.flatnonzero(wishes & ALLOWED)
        if len(rows):
            lists = [params.allowed_token_ids[slot] for slot in slots[rows].tolist()]
            masks.append(AllowedTokens(rows, lists, arrays))
        ends = {}
        for row in np.flatnonzero(wishes & BAD_WORDS).tolist():
            request = requests[row]
            # There are fewer where no token is to come, within what is computed again.
            assert num_output_tokens[row] <= request.num_output_tokens
            bad_words = params.bad_words[int(slots[row])]
            if found := bad_words.ends(request.token_ids, request.num_prompt_tokens):
                ends[row] = found
        if ends:
            masks.append(BadWordEnds(ends, arrays))
        too_early = num_output_tokens < params.min_tokens[slots]
        rows = np.flatnonzero((wishes & MIN_TOKENS != 0) & too_early)
        if len(rows):
            lists = [params.stop_token_ids[slot] for slot in slots[rows].tolist()]
            masks.append(StopTokens(rows, lists, arrays))
        return masks
