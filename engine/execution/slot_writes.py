"""The slot tables of an engine, and their changes before a step, from its schedule."""

from __future__ import annotations

import numpy as np
import torch

from engine.core.kv_cache_manager import blocks_for
from engine.core.schedule import MAX_STOP_TOKEN_IDS, Admissions, Schedule
from engine.execution.devices import ResolvedConfig
from kernels.slot_tables import SlotTables
from kernels.slot_writes import SlotWrites


def allocate_tables(config: ResolvedConfig, max_model_len: int, device: torch.device) -> SlotTables:
    """Return the tables of `max_num_seqs` sequences of up to `max_model_len` tokens."""
    return SlotTables.allocate(
        config.max_num_seqs,
        max_model_len=max_model_len,
        max_blocks=blocks_for(max_model_len, config.block_size),
        max_stop_token_ids=MAX_STOP_TOKEN_IDS,
        device=device,
    )


def slot_writes(schedule: Schedule, tables: SlotTables, num_rows: int) -> SlotWrites:
    """Return the changes of `tables` that `schedule` asks for, with `num_rows` rows in the step.

    The rows after those of the schedule are padding, with the slot -1 and no tokens.
    """
    writes, blocks = SlotWrites(tables), schedule.block_writes
    write_admissions(schedule.admissions, writes)
    ids = blocks.block_ids
    writes.set_lists("block_tables", blocks.slots, blocks.starts, ids.start_loc, ids.values)
    slots = np.full(num_rows, -1, dtype=np.int32)
    slots[: schedule.num_rows] = schedule.slots
    query_start_loc = np.full(num_rows + 1, schedule.total_num_tokens, dtype=np.int32)
    query_start_loc[0] = 0
    np.cumsum(schedule.num_tokens, out=query_start_loc[1 : schedule.num_rows + 1])
    writes.set_step(slots, query_start_loc)
    return writes


def write_admissions(admissions: Admissions, writes: SlotWrites) -> None:
    """Add the sequences that get a slot to `writes`, without their blocks."""
    if len(admissions.slots):
        writes.admit(
            admissions.slots,
            start_loc=admissions.token_ids.start_loc,
            token_ids=admissions.token_ids.values,
            num_prompt_tokens=admissions.num_prompt_tokens,
            num_computed_tokens=admissions.num_computed_tokens,
            min_tokens=admissions.min_tokens,
            max_tokens=admissions.max_tokens,
            stop_token_ids=admissions.stop_token_ids,
            top_k=admissions.top_k,
            temperature=admissions.temperature,
            top_p=admissions.top_p,
            min_p=admissions.min_p,
            repetition_penalty=admissions.repetition_penalty,
            presence_penalty=admissions.presence_penalty,
            frequency_penalty=admissions.frequency_penalty,
            seeds=admissions.seeds,
        )
