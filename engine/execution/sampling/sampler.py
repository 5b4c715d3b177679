"""Sampler: from the logits of a step to one token per row.

The host may not have read the tokens of earlier steps. `Sampler.plan` collects the rows' parameters
on the host, and `Sampler.sample` runs on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.core.schedule import Admissions, Int32s, SamplingBatch
from engine.execution.sampling.draw import draw
from engine.execution.sampling.logits_processors import (
    AllowedTokensMask,
    BiasAndPenalties,
    ForbiddenTokensMask,
    Mask,
    PenaltyAdmissions,
    PenaltyCounts,
    TokenHistory,
)
from engine.execution.sampling.logprobs import Logprobs, LogprobsPlan
from engine.execution.sampling.slot_params import (
    ALLOWED,
    BIAS,
    FILTERS,
    LOGPROBS,
    PENALTIES,
    SlotParams,
)
from engine.execution.sampling.step_arrays import StepArrays
from engine.nvtx import nvtx_range
from kernels.slot_tables import SlotTables


class Drawn(NamedTuple):
    """The tokens drawn for R rows, on the device."""

    token_ids: Tensor  # int64 [R]
    logprobs: Logprobs | None  # of the rows that ask for them


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How the R rows of a step are sampled. Made by `Sampler.plan`, for one `Sampler.sample`.

    Attributes:
        wants_token: [R], whose token is of interest.
        arrays: all arrays of the plan, uploaded together.
        admissions: sequences with penalties that have taken their slots since the last plan.
        masks: applied in this order.
        adjustment: biases and penalties.
        counts_output: whether any row has penalties, so that its token is counted.
        has_filters: whether any row has top_k, top_p or min_p.
        logprobs: of the rows that ask for log-probabilities.
    """

    wants_token: NDArray[np.bool_]
    arrays: StepArrays
    admissions: PenaltyAdmissions | None
    masks: Sequence[Mask]
    adjustment: BiasAndPenalties | None
    counts_output: bool
    has_filters: bool
    logprobs: LogprobsPlan | None

    @property
    def is_plain(self) -> bool:
        """Whether the tokens are drawn from the logits as they are, and nothing else is done."""
        special = (self.admissions, self.adjustment, self.logprobs)
        return special == (None, None, None) and not self.masks


class Sampler:
    """Chooses tokens for the sequences in the slots of `SlotTables`.

    A row's token depends on its logits, its parameters, its seed and its number of output tokens
    alone, never on the other rows. Log-probabilities are those before any processing.

    `admit` and `plan` run on the host, and read nothing that a step in flight uses. `sample` runs
    on the device: it takes the plans in the order in which they were made, possibly on another
    thread.
    """

    def __init__(self, tables: SlotTables, vocab_size: int) -> None:
        """Sample for the sequences in `tables`, from logits on their device.

        The first sequence with penalties allocates 4 bytes there per slot and vocabulary token.
        """
        self._tables = tables
        self._params = SlotParams(tables.num_slots, vocab_size)
        self._admitted: dict[int, TokenHistory] = {}  # since the last plan, those with penalties
        device = tables.buffer.device
        self._penalty_counts = PenaltyCounts(tables.num_slots, vocab_size, device)

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors on the device that `sample` changes, by name."""
        return self._penalty_counts.counts._asdict()

    def admit(self, admissions: Admissions) -> None:
        """Give slots to sequences: new ones, or ones that resume after a preemption.

        They replace the sequences that had the slots before.
        """
        self._params.admit(admissions)
        for item, slot in enumerate(admissions.slots.tolist()):
            self._admitted.pop(slot, None)
            if self._params.features[slot] & PENALTIES:
                token_ids, end = admissions.token_ids[item], admissions.num_prompt_tokens[item]
                self._admitted[slot] = TokenHistory(token_ids[:end], token_ids[end:])

    def plan(
        self,
        slots: Int32s,
        wants_token: NDArray[np.bool_],
        sampling: SamplingBatch,
    ) -> SamplePlan:
        """Plan the sampling of R rows.

        Args:
            slots: [R], each at most once.
            wants_token: [R], whose token is of interest.
            sampling: of the step; its rows are below R.
        """
        arrays, params = StepArrays(), self._params
        features = params.features[slots]
        used = int(np.bitwise_or.reduce(features, initial=0))
        admissions = None
        if self._admitted:
            admissions = PenaltyAdmissions.gather(self._admitted, arrays)
            self._admitted = {}
        masks: list[Mask] = []
        if used & ALLOWED:
            rows = np.flatnonzero(features & ALLOWED)
            lists = [params.allowed_token_ids[slot] for slot in slots[rows].tolist()]
            masks.append(AllowedTokensMask(rows, lists, arrays))
        if len(sampling.forbidden_rows):
            masks.append(ForbiddenTokensMask(sampling, arrays))
        adjustment = logprobs = None
        if used & (BIAS | PENALTIES):
            biases = [params.bias.get(slot) for slot in slots.tolist()]
            adjustment = BiasAndPenalties(biases, params.penalties(slots), arrays)
        rows = np.flatnonzero((features & LOGPROBS != 0) & wants_token)
        if len(rows):
            logprobs = LogprobsPlan(rows, params.num_top_logprobs[slots[rows]], arrays)
        return SamplePlan(
            wants_token=wants_token,
            arrays=arrays,
            admissions=admissions,
            masks=masks,
            adjustment=adjustment,
            counts_output=bool(used & PENALTIES),
            has_filters=bool(used & FILTERS),
            logprobs=logprobs,
        )

    @nvtx_range("draw")
    def sample(self, plan: SamplePlan, logits: Tensor, slots: Tensor) -> Drawn:
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
        token_ids = draw(logits, self._tables, slots, has_filters=plan.has_filters)
        if plan.counts_output:
            self._penalty_counts.count(slots, token_ids)
        if plan.logprobs is None or kept is None:
            return Drawn(token_ids, None)
        return Drawn(token_ids, plan.logprobs.compute(kept, token_ids, arrays))

    def free_penalty_counts(self) -> None:
        """Free what the first sequence with penalties has allocated; no such sequence may run."""
        self._penalty_counts.free()
