"""Sampler: from the logits of a step to one token per row.

The host may not have read the tokens of earlier steps. `Sampler.plan` collects on the host what the
rows need, and `Sampler.sample` runs on the device. What a sequence asks for is in the slot tables,
written when it gets its slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.ragged import Int32s
from engine.core.schedule import (
    Adjustments,
    NewRequestData,
    SamplingBatch,
    SchedulerOutput,
    num_sampled_rows,
)
from engine.layers.rank_group import RankGroup
from engine.nvtx import nvtx_range
from kernels.sampling import logit_order
from kernels.sampling.adjust_logits import RowMasks, adjust_logits
from kernels.sampling.draw import sample_tokens
from kernels.sampling.logprobs import Logprobs, token_logprobs
from kernels.sampling.token_counts import TokenCounts, count_tokens
from kernels.sampling.truncate import truncate_logits
from kernels.step.sampling_columns import (
    ALLOWED,
    BEAM,
    BIAS,
    FILTERS,
    LOGPROBS,
    MIN_TOKENS,
    PENALTIES,
    TRUNCATION,
)
from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.upload import upload, upload_together

_NONE = np.zeros(0, dtype=np.int32)


def add_adjustments(logits: Tensor, adjustments: Adjustments) -> None:
    """Add them to `logits`, float32 [R, V], in place, without waiting for the device.

    In what changes NaN becomes -inf and infinity the largest float.
    """
    lists = (adjustments.rows, adjustments.token_ids, adjustments.values.view("int32"))
    if len(adjustments.rows):
        rows, token_ids, bits = upload_together(lists, logits.device)
        indices = rows.long(), token_ids.long()  # each once
        logits[indices] = logit_order.reference(logits[indices] + bits.view(logits.dtype))
    # Row by row: nothing is reserved for a copy of all logits.
    for row, values in zip(adjustments.dense_rows.tolist(), adjustments.dense, strict=True):
        added = upload(values.view("int32"), logits.device).view(logits.dtype)
        logits[row] = logit_order.reference(logits[row] + added)


class Drawn(NamedTuple):
    """The tokens drawn for R rows, on the device."""

    token_ids: Tensor  # int64 [R]
    logprobs: Logprobs | None  # of the rows that ask for them


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How the R rows of a step are sampled. Made by `Sampler.plan`, for one `Sampler.sample`.

    Attributes:
        wants_token: [R], whose token is of interest.
        has_penalties: whether any row has penalties, so that tokens are counted.
        adjusts_logits: whether any row has a mask, biases or penalties.
        has_filters: whether any row has top_k, top_p or min_p.
        truncates: whether any row has top_n_sigma or typical_p.
        mask_ids: int32 [R], which of `masks` each row has; -1: none. Empty if no row has one.
        masks, adjustments: as in `SamplingBatch`.
        logprobs_rows: int32 [K], which ask for log-probabilities.
        num_top_logprobs: int32 [K], how many most likely tokens each of them asks for.
        beams: int32 [M], which of `logprobs_rows` are beams.
    """

    wants_token: NDArray[np.bool_]
    has_penalties: bool
    adjusts_logits: bool
    has_filters: bool
    truncates: bool
    mask_ids: Int32s
    masks: Int32s
    adjustments: Adjustments | None
    logprobs_rows: Int32s
    num_top_logprobs: Int32s
    beams: Int32s

    @property
    def is_plain(self) -> bool:
        """Whether the tokens are drawn from the logits as they are, and nothing else is done."""
        changes = self.adjusts_logits or self.truncates or self.adjustments is not None
        return not changes and not len(self.logprobs_rows)

    def upload(self, device: torch.device) -> list[Tensor]:
        """Return `mask_ids`, `masks`, `logprobs_rows` and `beams` on `device`."""
        arrays = (self.mask_ids, self.masks, self.logprobs_rows, self.beams)
        return upload_together(arrays, device)


class Sampler:
    """Chooses tokens for the sequences in the slots of `SeqSlotTables`.

    A row's token depends on its logits, its parameters, its seed and its number of output tokens
    alone, never on the other rows. Log-probabilities are those before any processing, except a
    beam's: as in transformers, these are processed in place of the logits.

    `admit` and `plan` run on the host, and read nothing that a step in flight uses. `sample` runs
    on the device: it takes the plans in the order in which they were made.
    """

    def __init__(self, tables: SeqSlotTables, vocab_size: int) -> None:
        """Sample for the sequences in `tables`, from logits on their device.

        The first sequence with penalties allocates 4 bytes there per slot and vocabulary token.
        """
        self._tables = tables
        self._vocab_size = vocab_size
        # By slot, as in `NewRequestData`.
        self._features = np.zeros(tables.num_slots, dtype=np.int32)
        self._min_tokens = np.zeros_like(self._features)
        self._num_top_logprobs = np.zeros_like(self._features)
        self._counts = self._new_counts(1)

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors on the device that `sample` changes, beside the tables, by name."""
        return self._counts._asdict()

    def admit(self, new_requests: NewRequestData) -> None:
        """Give slots to sequences: new ones, or ones that resume after a preemption."""
        slots = new_requests.slots
        self._features[slots] = new_requests.features
        self._min_tokens[slots] = new_requests.min_tokens
        self._num_top_logprobs[slots] = new_requests.num_top_logprobs.clip(max=self._vocab_size)

    def plan(self, schedule: SchedulerOutput, sampling: SamplingBatch) -> SamplePlan:
        """Plan the sampling of the first rows of `schedule`, up to the last that wants a token."""
        num_rows = num_sampled_rows(schedule)
        slots, wants_token = schedule.slots[:num_rows], schedule.wants_token[:num_rows]
        features = self._features[slots] * wants_token
        used = int(np.bitwise_or.reduce(features, initial=0))
        num_masks = len(sampling.mask_rows)
        adjusts_logits = num_masks > 0 or used & (ALLOWED | BIAS | PENALTIES) > 0
        if used & MIN_TOKENS and not adjusts_logits:
            is_early = schedule.num_output_tokens[:num_rows] < self._min_tokens[slots]
            adjusts_logits = bool((is_early & (features & MIN_TOKENS > 0)).any())
        mask_ids = logprobs_rows = num_top_logprobs = beams = _NONE
        if num_masks:
            mask_ids = np.full(num_rows, -1, dtype=np.int32)
            mask_ids[sampling.mask_rows] = np.arange(num_masks)
        if used & LOGPROBS:
            logprobs_rows = np.flatnonzero(features & LOGPROBS).astype(np.int32)
            num_top_logprobs = self._num_top_logprobs[slots[logprobs_rows]]
            if used & BEAM:
                beams = np.flatnonzero(features[logprobs_rows] & BEAM).astype(np.int32)
        return SamplePlan(
            wants_token=wants_token,
            has_penalties=used & PENALTIES > 0,
            adjusts_logits=adjusts_logits,
            has_filters=used & FILTERS > 0,
            truncates=used & TRUNCATION > 0,
            mask_ids=mask_ids,
            masks=sampling.masks,
            adjustments=sampling.adjustments,
            logprobs_rows=logprobs_rows,
            num_top_logprobs=num_top_logprobs,
            beams=beams,
        )

    @nvtx_range("draw")
    def sample(self, plan: SamplePlan, logits: Tensor, slots: Tensor) -> Drawn:
        """Sample according to `plan`, without waiting for the device.

        Args:
            plan: the oldest that has not been sampled from.
            logits: float32 [R, V], may be overwritten.
            slots: int32 [R], those of the plan; -1 if the sequence has ended on the device, or
                wants no token: it is undefined then.
        """
        if plan.is_plain:
            has_filters = plan.has_filters
            return Drawn(sample_tokens(logits, self._tables, slots, has_filters=has_filters), None)
        mask_ids, masks, rows, beams = plan.upload(logits.device)
        if len(beams):
            beam_rows = rows.index_select(0, beams)
            logits[beam_rows] = logits.index_select(0, beam_rows).log_softmax(-1)
        kept = logits.index_select(0, rows) if len(rows) else None  # before they change
        if plan.has_penalties:
            if len(self._counts.output_counts) < self._tables.num_slots:
                self._counts = self._new_counts(self._tables.num_slots)
            count_tokens(self._counts, self._tables, slots)
        if plan.adjusts_logits:
            row_masks = RowMasks(mask_ids, masks) if len(mask_ids) else None
            adjust_logits(logits, self._tables, slots, self._counts, row_masks)
        if kept is not None and len(beams):
            kept[beams] = logits.index_select(0, beam_rows)
        if plan.adjustments is not None:
            add_adjustments(logits, plan.adjustments)
        if plan.truncates:
            truncate_logits(logits, self._tables, slots)
        token_ids = sample_tokens(logits, self._tables, slots, has_filters=plan.has_filters)
        if kept is None:
            return Drawn(token_ids, None)
        num_top = int(plan.num_top_logprobs.max())
        found = token_logprobs(kept, token_ids.index_select(0, rows), num_top)
        if len(beams):  # not normalised again
            top = found.top_token_ids.index_select(0, beams)
            found.top_logprobs[beams] = kept.index_select(0, beams).gather(-1, top)
        return Drawn(token_ids, found)

    def free_penalty_counts(self) -> None:
        """Free what the first sequence with penalties has allocated; no such sequence may run."""
        self._counts = self._new_counts(1)

    def _new_counts(self, num_slots: int) -> TokenCounts:
        return TokenCounts.allocate(num_slots, self._vocab_size, self._tables.buffer.device)


class RankSampler(Sampler):
    """Draws at rank 0, whose tokens all ranks take: none can go on with others."""

    def __init__(self, tables: SeqSlotTables, vocab_size: int, group: RankGroup) -> None:
        """Sample as `Sampler`, for the ranks of `group`."""
        super().__init__(tables, vocab_size)
        self._group = group

    def admit(self, admissions: NewRequestData) -> None:
        if self._group.rank == 0:  # elsewhere no row asks for anything
            super().admit(admissions)

    def sample(self, plan: SamplePlan, logits: Tensor, slots: Tensor) -> Drawn:
        if self._group.rank == 0:
            drawn = super().sample(plan, logits, slots)
        else:
            drawn = Drawn(torch.zeros(len(slots), dtype=torch.int64, device=slots.device), None)
        return drawn._replace(token_ids=self._group.share(drawn.token_ids))
