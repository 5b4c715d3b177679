"""Speculative decoding: samples behind the last token of each row, then each accepted draft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.core.ragged import Int32s
from engine.core.schedule import (
    SamplingBatch,
    SchedulerOutput,
    num_sampled_rows,
)
from engine.core.spec_decode.draft_tokens import DraftTokens
from engine.execution.downloads import Downloads
from engine.execution.pending_step import NO_PROMPTS, ForwardResults, PendingStep
from engine.execution.sampler import Sampler
from engine.models.causal_lm import CausalLM
from kernels.step.sampling_columns import RUNNING
from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.token_scatter import scatter_tokens
from kernels.step.upload import upload


@dataclass(frozen=True, slots=True)
class _Round:
    """The draws behind the drafts of one number; number 0 is the last known token of each row.

    Attributes:
        schedule: as if a step had these rows alone.
        logits_indices: int32 [R], of the hidden states of its rows among those of the step.
        earlier: int32 [R], its rows in the round before.
        drafts: int32 [R], what must have been drawn there.
    """

    schedule: SchedulerOutput
    logits_indices: Int32s
    earlier: Int32s
    drafts: Int32s


class DraftedSteps:
    """Draws the tokens of steps with drafts.

    One draw after the other, as if each were that of a step of its own: so penalties, stop tokens
    and log-probabilities are those of the tokens before it, and its random numbers are the same.
    """

    def __init__(
        self, model: CausalLM, tables: SeqSlotTables, sampler: Sampler, downloads: Downloads
    ) -> None:
        """Draw tokens of `model` with `sampler` for the sequences in `tables`."""
        self._model = model
        self._tables = tables
        self._sampler = sampler
        self._downloads = downloads

    @torch.inference_mode()
    def draw(
        self, schedule: SchedulerOutput, sampling: SamplingBatch, forward: ForwardResults
    ) -> PendingStep:
        """Draw the tokens of `schedule`, which has drafts, from its forward pass."""
        drafts, tables = schedule.drafts, self._tables
        assert drafts is not None
        device = tables.buffer.device
        rounds = list(_rounds(schedule, drafts))
        drafted = upload(schedule.slots[drafts.rows], device).long()
        tables.num_tokens[drafted] = upload(drafts.starts, device)  # without the drafts again
        logits_indices = upload(np.concatenate([each.logits_indices for each in rounds]), device)
        logits = self._model.compute_logits(forward.hidden.index_select(0, logits_indices))
        parts = torch.split(logits, [len(each.logits_indices) for each in rounds])
        slots = forward.slots[: len(rounds[0].logits_indices)]
        prompts, steps = forward.prompts, []
        for each, part, following in zip(rounds, parts, [*rounds[1:], None], strict=True):
            plan = self._sampler.plan(each.schedule, sampling)
            drawn = self._sampler.sample(plan, part, slots)
            finish_reasons = scatter_tokens(tables, slots, drawn.token_ids)
            steps.append(PendingStep.of(plan, drawn, finish_reasons, self._downloads, prompts))
            if following is None:
                break
            slots = _next_slots(following, slots, drawn.token_ids, finish_reasons)
            if not (slots >= 0).any():
                break
            # The host has no part in what is drawn behind a draft.
            sampling = SamplingBatch(sampling.mask_rows[:0], sampling.masks[:0])
            prompts = NO_PROMPTS
        # Nothing behind the tokens drawn counts as computed.
        tables.num_computed_tokens[drafted] = tables.num_tokens[drafted] - 1
        steps[0].drafted = steps[1:]
        return steps[0]


def _rounds(schedule: SchedulerOutput, drafts: DraftTokens) -> Iterator[_Round]:
    """Yield the draws of a step in their order."""
    rows = np.arange(num_sampled_rows(schedule), dtype=np.int32)
    num_drafts = np.zeros(schedule.num_rows, dtype=np.int32)
    num_drafts[drafts.rows] = drafts.token_ids.lengths
    last = np.cumsum(schedule.num_tokens, dtype=np.int32) - 1 - num_drafts
    yield _Round(schedule, last[rows], rows, rows)
    for number in range(1, drafts.most + 1):
        before, (rows, token_ids) = rows, drafts.reaching(number)
        part = replace(
            schedule,
            slots=schedule.slots[rows],
            num_tokens=np.ones_like(rows),
            wants_token=np.ones(len(rows), dtype=np.bool_),
            num_output_tokens=schedule.num_output_tokens[rows] + number,
            num_decodes=len(rows),
        )
        earlier = np.searchsorted(before, rows).astype(np.int32)
        yield _Round(part, last[rows] + number, earlier, token_ids)


def _next_slots(round_: _Round, slots: Tensor, token_ids: Tensor, finish_reasons: Tensor) -> Tensor:
    """Return the slots of a round after that of `slots`, which drew `token_ids`.

    They are -1 where another token than the draft was drawn, or the sequence has ended.
    """
    earlier = upload(round_.earlier, slots.device).long()
    is_drawn = token_ids[earlier] == upload(round_.drafts, slots.device)
    goes_on = is_drawn & (finish_reasons[earlier] == RUNNING)
    return torch.where(goes_on, slots[earlier], -1)
