"""StepPlan: what the host decides about a step, in arrays that it does not touch afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core.kv_cache_manager import BlockCopy
from engine.core.scheduler import Schedule, ScheduledRequest
from engine.execution.sampling import SamplePlan, Sampler
from engine.request import Request
from kernels.slot_tables import SlotTables, SlotWrites


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of B rows.

    Attributes:
        swap_out, copies, swap_in: blocks to move before it.
        writes: changes of the slot tables to make before it.
        slots: int32 [B], of the rows.
        query_start_loc: int32 [B + 1], their tokens.
        num_decodes: so many rows at the beginning have one token.
        samples: what the first rows ask of the sampler, as far as there is one that wants a token.
        wants_token: which of these rows do want one.
    """

    swap_out: list[BlockCopy]
    copies: list[BlockCopy]
    swap_in: list[BlockCopy]
    writes: SlotWrites
    slots: NDArray[np.int32]
    query_start_loc: NDArray[np.int32]
    num_decodes: int
    samples: SamplePlan | None
    wants_token: list[bool]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.query_start_loc[-1])


def plan_step(schedule: Schedule, tables: SlotTables, sampler: Sampler) -> StepPlan:
    """Return the plan of a schedule with at least one row, for the device that has `tables`."""
    writes = SlotWrites(tables)
    for row in schedule.rows:
        if row.is_new:
            _admit(row.request, row.start, writes, tables)
            sampler.admit(_slot(row.request), row.request)
        elif row.first_changed_block < len(row.request.block_ids):
            changed = row.request.block_ids[row.first_changed_block :]
            writes.set_blocks(_slot(row.request), row.first_changed_block, changed)
    slots = np.array([_slot(row.request) for row in schedule.rows], dtype=np.int32)
    counts = np.array([row.num_tokens for row in schedule.rows], dtype=np.int32)
    wants_token = [row.wants_token for row in schedule.rows]
    num_sampled = max((i for i, wants in enumerate(wants_token, 1) if wants), default=0)
    return StepPlan(
        swap_out=schedule.swap_out,
        copies=schedule.copies,
        swap_in=schedule.swap_in,
        writes=writes,
        slots=slots,
        query_start_loc=np.concatenate([[0], counts.cumsum()]).astype(np.int32),
        num_decodes=int(counts.searchsorted(2)),
        samples=_plan_samples(schedule.rows[:num_sampled], slots[:num_sampled], sampler),
        wants_token=wants_token[:num_sampled],
    )


def _plan_samples(
    rows: Sequence[ScheduledRequest], slots: NDArray[np.int32], sampler: Sampler
) -> SamplePlan | None:
    if not rows:
        return None
    ends = np.array([row.start + row.num_tokens for row in rows], dtype=np.int64)
    num_prompt_tokens = np.array([row.request.num_prompt_tokens for row in rows], dtype=np.int64)
    # Negative where a chunk ends within the prompt, of which nothing comes.
    num_output_tokens = np.maximum(ends - num_prompt_tokens, 0)
    return sampler.plan(slots, num_output_tokens, [row.request for row in rows])


def _admit(
    request: Request, num_computed_tokens: int, writes: SlotWrites, tables: SlotTables
) -> None:
    # What does not fit ends nothing on the device: the sequence goes on until it has been read.
    stop_token_ids = sorted(request.stop_token_ids)[: tables.stop_token_ids.shape[1]]
    writes.admit(
        _slot(request),
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        min_tokens=request.sampling_params.min_tokens,
        max_tokens=request.max_tokens,
        stop_token_ids=stop_token_ids,
        block_ids=request.block_ids,
    )


def _slot(request: Request) -> int:
    assert request.slot is not None
    return request.slot
