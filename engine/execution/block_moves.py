"""The copies of KV blocks before a step, in the order in which none overwrites another's source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.core.schedule import Int32s
from engine.nvtx import nvtx_range


class BlockMover(Protocol):
    """Copies blocks, as `kernels.block_copy.BlockCopier`: a call reads all before it writes any."""

    def swap_out(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy blocks of the device to blocks of the host."""

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy blocks of the device to others of its blocks."""

    def swap_in(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy blocks of the host to blocks of the device."""


@nvtx_range("move blocks")
def move_blocks(
    mover: BlockMover,
    *,
    swap_out: Int32s,
    copies: Int32s,
    swap_in: Int32s,
) -> None:
    """Carry out the block moves of a `Schedule`, before anything else of its step."""
    # Swap-outs first: their blocks may be reused by the copies and swap-ins. Swap-ins last: they
    # may reuse the source of a copy, and may bring back what has just been swapped out.
    for pairs, move in (
        (swap_out, mover.swap_out),
        (copies, mover.copy),
        (swap_in, mover.swap_in),
    ):
        if len(pairs):
            move(pairs[:, 0].tolist(), pairs[:, 1].tolist())
