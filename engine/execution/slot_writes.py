"""The changes of the slot tables before a step, from its schedule."""

from __future__ import annotations

from engine.core.schedule import Schedule
from kernels.slot_tables import SlotTables, SlotWrites


def slot_writes(schedule: Schedule, tables: SlotTables) -> SlotWrites:
    """Return the changes of `tables` that `schedule` asks for."""
    writes, admissions, blocks = SlotWrites(tables), schedule.admissions, schedule.block_writes
    for item, slot in enumerate(admissions.slots.tolist()):
        writes.admit(
            slot,
            token_ids=admissions.token_ids[item],
            num_prompt_tokens=int(admissions.num_prompt_tokens[item]),
            num_computed_tokens=int(admissions.num_computed_tokens[item]),
            min_tokens=int(admissions.min_tokens[item]),
            max_tokens=int(admissions.max_tokens[item]),
            stop_token_ids=admissions.stop_token_ids[item],
            block_ids=(),
        )
    for item, slot in enumerate(blocks.slots.tolist()):
        writes.set_blocks(slot, int(blocks.starts[item]), blocks.block_ids[item])
    return writes
