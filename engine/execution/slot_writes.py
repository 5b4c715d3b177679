"""Writes the changes of a SchedulerOutput to the slot tables on the device before its step."""

from __future__ import annotations

import numpy as np
import torch

from engine.core.constraints.token_masks import token_mask
from engine.core.kv.group_windows import blocks_for
from engine.core.kv.state_saves import MOST_SAVES
from engine.core.ragged import Int32s, Ragged
from engine.core.schedule import MAX_STOP_TOKEN_IDS, NewRequestData, SchedulerOutput
from engine.errors import InsufficientMemoryError
from engine.execution.devices import ResolvedConfig
from engine.execution.memory.step_memory import is_out_of_memory
from engine.validation.limits import MAX_LOGIT_BIAS
from kernels.step.sampling_columns import ALLOWED, SAMPLING_COLUMNS
from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.slot_writes import SlotWrites


def allocate_tables(
    config: ResolvedConfig,
    vocab_size: int,
    max_model_len: int,
    device: torch.device,
    *,
    num_groups: int,
    keeps_states: bool = False,
) -> SeqSlotTables:
    """Return the tables of `max_num_seqs` sequences of up to `max_model_len` tokens.

    Args:
        num_groups: of layers, each with block tables of its own.
        keeps_states: whether any layer keeps states.

    Raises:
        InsufficientMemoryError: there is no room for them on `device`.
    """
    try:
        return SeqSlotTables.allocate(
            config.max_num_seqs,
            max_model_len=max_model_len,
            max_blocks=blocks_for(max_model_len, config.block_size),
            num_groups=num_groups,
            max_stop_token_ids=MAX_STOP_TOKEN_IDS,
            max_biases=MAX_LOGIT_BIAS,
            vocab_size=vocab_size,
            device=device,
            max_state_saves=MOST_SAVES if keeps_states else 0,
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InsufficientMemoryError(
            f"the tables of {config.max_num_seqs} sequences of up to {max_model_len} "
            f"tokens do not fit into the memory of {device.type}; lower it",
            param="max_num_seqs",
        ) from error


def slot_writes(schedule: SchedulerOutput, tables: SeqSlotTables, num_rows: int) -> SlotWrites:
    """Return the changes of `tables` that `schedule` asks for, with `num_rows` rows in the step.

    The rows after those of the schedule are padding, with the slot -1 and no tokens.
    """
    writes, blocks = SlotWrites(tables), schedule.block_writes
    write_new_requests(schedule.new_requests, writes, tables.allowed_tokens.shape[1])
    ids = blocks.block_ids
    starts = blocks.groups * tables.max_blocks + blocks.starts
    writes.set_lists("block_tables", blocks.slots, starts, ids.start_loc, ids.values)
    if (forced := schedule.forced) is not None:
        _append(writes, forced.slots, forced.starts, forced.token_ids)
    if (drafts := schedule.drafts) is not None:
        _append(writes, schedule.slots[drafts.rows], drafts.starts, drafts.token_ids)
    slots = np.full(num_rows, -1, dtype=np.int32)
    slots[: schedule.num_rows] = schedule.slots
    query_start_loc = np.full(num_rows + 1, schedule.total_num_tokens, dtype=np.int32)
    query_start_loc[0] = 0
    np.cumsum(schedule.num_tokens, out=query_start_loc[1 : schedule.num_rows + 1])
    writes.set_step(slots, query_start_loc)
    if (states := schedule.states) is not None:
        # Rows of padding are idle: what they name is neither read nor written.
        writes.set_states(states.reads, states.writes, states.saves)
    return writes


def _append(writes: SlotWrites, slots: Int32s, starts: Int32s, token_ids: Ragged) -> None:
    """Add tokens behind the first `starts` of the sequences in `slots` to `writes`."""
    writes.set_lists("token_ids", slots, starts, token_ids.start_loc, token_ids.values)
    writes.set_column("num_tokens", slots, starts + token_ids.lengths)


def write_new_requests(
    new_requests: NewRequestData, writes: SlotWrites, num_mask_words: int
) -> None:
    """Add the sequences that get a slot to `writes`, without their blocks."""
    slots, biases = new_requests.slots, new_requests.bias_token_ids
    if not len(slots):
        return
    writes.admit(
        slots,
        start_loc=new_requests.token_ids.start_loc,
        token_ids=new_requests.token_ids.values,
        num_prompt_tokens=new_requests.num_prompt_tokens,
        num_computed_tokens=new_requests.num_computed_tokens,
        min_tokens=new_requests.min_tokens,
        max_tokens=new_requests.max_tokens,
        stop_token_ids=new_requests.stop_token_ids,
        features=new_requests.features,
        num_biases=biases.lengths,
        seeds=new_requests.seeds,
        **{name: getattr(new_requests, name) for name in SAMPLING_COLUMNS},
    )
    if len(biases.values):
        values = new_requests.bias_values.view(np.int32)
        writes.set_lists("bias_token_ids", slots, 0 * slots, biases.start_loc, biases.values)
        writes.set_lists("bias_values", slots, 0 * slots, biases.start_loc, values)
    constrained = np.flatnonzero(new_requests.features & ALLOWED)
    if len(constrained):
        allowed = [new_requests.allowed_token_ids[i] for i in constrained.tolist()]
        masks = np.stack([token_mask(token_ids, num_mask_words) for token_ids in allowed])
        writes.set_column("allowed_tokens", slots[constrained], masks)
