"""StepPlan: the host's plan of a step, in arrays that it does not change afterwards."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine.core.kv_cache_manager import BlockCopy
from engine.core.request import Request
from engine.core.schedule import Schedule
from engine.execution.sampling.sampler import SamplePlan, Sampler
from kernels.slot_tables import SlotTables, SlotWrites


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of B rows.

    Attributes:
        swap_out, copies, swap_in: blocks to move before it.
        writes: changes of the slot tables to make before it.
        slots: int32 [B], of the rows.
        query_start_loc: int32 [B + 1], their tokens.
        num_decodes: leading rows with one token.
        samples: sampling plan of the leading rows, up to the last one that samples a token.
        wants_token: which of these rows sample a token.
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
    slots, counts, num_output_tokens = [], [], []
    num_sampled = 0
    for i, (request, slot, start, num_tokens, wants_token, changed) in enumerate(schedule.rows, 1):
        slots.append(slot)
        counts.append(num_tokens)
        num_output_tokens.append(start + num_tokens - request.num_prompt_tokens)
        if wants_token:
            num_sampled = i
        if changed is None:
            _admit(request, slot, start, writes, tables)
            sampler.admit(slot, request)
        elif changed < len(request.kv.block_ids):
            writes.set_blocks(slot, changed, request.kv.block_ids[changed:])
    rows, slot_array = schedule.rows, np.array(slots, dtype=np.int32)
    samples = None
    if num_sampled:
        samples = sampler.plan(
            slot_array[:num_sampled],
            # Negative if a chunk ends within the prompt: its token is dropped.
            np.array(num_output_tokens[:num_sampled], dtype=np.int64),
            [row.request for row in rows[:num_sampled]],
        )
    return StepPlan(
        swap_out=schedule.swap_out,
        copies=schedule.copies,
        swap_in=schedule.swap_in,
        writes=writes,
        slots=slot_array,
        query_start_loc=np.array([0, *accumulate(counts)], dtype=np.int32),
        num_decodes=bisect_left(counts, 2),
        samples=samples,
        wants_token=[row.wants_token for row in rows[:num_sampled]],
    )


def _admit(
    request: Request,
    slot: int,
    num_computed_tokens: int,
    writes: SlotWrites,
    tables: SlotTables,
) -> None:
    # Further ids are not checked on the device: the host ends the sequence when it reads the token.
    stop_token_ids = sorted(request.stop_token_ids)[: tables.stop_token_ids.shape[1]]
    writes.admit(
        slot,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        min_tokens=request.sampling_params.min_tokens,
        max_tokens=request.max_tokens,
        stop_token_ids=stop_token_ids,
        block_ids=request.kv.block_ids,
    )
