"""The copies of KV blocks before a step, in the order in which none overwrites another's source."""

from __future__ import annotations

from engine.core.schedule import Schedule
from engine.nvtx import nvtx_range
from kernels.block_copy import BlockCopier


@nvtx_range("move blocks")
def move_blocks(copier: BlockCopier, schedule: Schedule) -> None:
    """Carry out the block moves of `schedule`, before anything else of its step."""
    # Swap-outs first: their blocks may be reused by the copies and swap-ins. Swap-ins last: they
    # may reuse the source of a copy, and may bring back what has just been swapped out.
    for pairs, move in (
        (schedule.swap_out, copier.swap_out),
        (schedule.copies, copier.copy),
        (schedule.swap_in, copier.swap_in),
    ):
        if len(pairs):
            move(pairs[:, 0].tolist(), pairs[:, 1].tolist())
