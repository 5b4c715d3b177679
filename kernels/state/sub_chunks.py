"""Sub-chunks of a step: the pieces in which rows of several tokens are computed on a GPU.

A row's tokens are cut at the multiples of 64 of their positions in the sequence, wherever the row
starts, so that a sequence that is cut there into steps has the same sub-chunks as a whole pass.
Rows of one token and idle rows have none. The index of the sub-chunks depends on lengths that only
the device knows; its size does not, so that it can be built in a CUDA graph: surplus items are
idle. One index serves all layers of a step.

Each program finds the rows of its items by the cumulated counts of all rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device as devices
from kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from kernels.device import cdiv, next_power_of_2

SIZE = 64


class SubChunks(NamedTuple):
    """The index of a step's sub-chunks; valid for the rows that it was made from.

    Attributes:
        items: int32 [N, 5]: row (-1: idle), first token and end among those of the step, position
            of the first token in the sequence, and of the row's first token. The items of a row
            are adjacent and in order.
        firsts: int32 [B], first item of each row; undefined for a row that has none.
    """

    items: Tensor
    firsts: Tensor


def most_items(num_tokens: int, num_rows: int) -> int:
    """Return N, the most sub-chunks that rows of so many tokens in all can have.

    A row of n tokens has at most (n + 126) // 64, those of two tokens two; none is empty.
    """
    return min(num_tokens, (num_tokens + 2 * (SIZE - 1) * num_rows) // SIZE) if num_rows else 0


def index_sub_chunks(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    writes: Tensor,
    num_tokens: int,
    *,
    num_decodes: int = 0,
) -> SubChunks:
    """Return the sub-chunks of a step's rows, found on their device.

    Args:
        query_start_loc, seq_lens, writes: as in `StepStates`.
        num_tokens: of the step; padding may be among them.
        num_decodes: so many rows, at least, have one token; all: there are no sub-chunks.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    check_shape("seq_lens", seq_lens, (None,))
    num_rows = len(seq_lens)
    for name, tensor, size in (
        ("query_start_loc", query_start_loc, num_rows + 1),
        ("seq_lens", seq_lens, num_rows),
        ("writes", writes, num_rows),
    ):
        check_shape(name, tensor, (size,))
        check_dtype(name, tensor, torch.int32)
        check_device(name, tensor, seq_lens.device)
        check_contiguous(name, tensor)
    num_items = most_items(num_tokens - num_decodes, num_rows - num_decodes)
    if not devices.runs_triton(seq_lens):
        return reference(query_start_loc, seq_lens, writes, num_items)
    found = SubChunks(items=seq_lens.new_empty(num_items, 5), firsts=seq_lens.new_empty(num_rows))
    if num_items:
        _launch(query_start_loc, seq_lens, writes, found)
    return found


def reference(
    query_start_loc: Tensor, seq_lens: Tensor, writes: Tensor, num_items: int
) -> SubChunks:
    """Return the sub-chunks, found row by row; reads the rows on the host."""
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    items: list[list[int]] = []
    firsts = [0] * len(lengths)
    for row, (length, write) in enumerate(zip(lengths, writes.tolist(), strict=True)):
        begin, end = starts[row], starts[row + 1]
        if length == 0 or write < 0 or end - begin < 2:
            continue
        firsts[row] = len(items)
        start = length - (end - begin)
        for grid in range(start // SIZE * SIZE, length, SIZE):
            position = max(start, grid)
            first, last = position - start, min(length, grid + SIZE) - start
            items.append([row, begin + first, begin + last, position, start])
    items += [[-1, 0, 0, 0, 0]] * (num_items - len(items))
    return SubChunks(
        items=seq_lens.new_tensor(items).view(num_items, 5), firsts=seq_lens.new_tensor(firsts)
    )


# Not specialised on numbers of rows and items: another step must not recompile.
@triton.jit(
    do_not_specialize=["num_rows", "num_items"],
    do_not_specialize_on_alignment=["starts_ptr", "seq_lens_ptr", "writes_ptr"],
)
def _kernel(
    starts_ptr,
    seq_lens_ptr,
    writes_ptr,
    items_ptr,
    firsts_ptr,
    num_rows,
    num_items,
    SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    o_b = tl.arange(0, BLOCK_B)
    m_b = o_b < num_rows
    b_begin = tl.load(starts_ptr + o_b, mask=m_b, other=0)
    b_tokens = tl.load(starts_ptr + o_b + 1, mask=m_b, other=0) - b_begin
    b_len = tl.load(seq_lens_ptr + o_b, mask=m_b, other=0)
    b_write = tl.load(writes_ptr + o_b, mask=m_b, other=-1)
    b_start = b_len - b_tokens
    b_grid = b_start // SIZE  # of rows that are not idle: 0 or more
    b_count = (b_len + SIZE - 1) // SIZE - b_grid
    b_count = tl.where((b_len > 0) & (b_write >= 0) & (b_tokens > 1), b_count, 0)
    b_end = tl.cumsum(b_count)
    b_first = b_end - b_count
    if tl.program_id(0) == 0:
        tl.store(firsts_ptr + o_b, b_first, mask=m_b)

    o_w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    m_w = o_w < num_items
    m_own = (b_first[None, :] <= o_w[:, None]) & (o_w[:, None] < b_end[None, :])
    b_own = m_own.to(tl.int32)  # [BLOCK_W, BLOCK_B], one at most in each row
    b_row = tl.sum(b_own * (o_b + 1)[None, :], 1) - 1
    b_index = tl.sum(b_own * (b_grid - b_first)[None, :], 1) + o_w
    b_from = tl.sum(b_own * b_start[None, :], 1)
    b_until = tl.sum(b_own * b_len[None, :], 1)
    b_shift = tl.sum(b_own * (b_begin - b_start)[None, :], 1)  # of a position to its token
    b_position = tl.maximum(b_from, b_index * SIZE)
    b_stop = tl.minimum(b_until, b_index * SIZE + SIZE)
    m_idle = b_row < 0
    p_item = items_ptr + o_w * 5
    tl.store(p_item, b_row, mask=m_w)
    tl.store(p_item + 1, tl.where(m_idle, 0, b_position + b_shift), mask=m_w)
    tl.store(p_item + 2, tl.where(m_idle, 0, b_stop + b_shift), mask=m_w)
    tl.store(p_item + 3, tl.where(m_idle, 0, b_position), mask=m_w)
    tl.store(p_item + 4, b_from, mask=m_w)


def settings(num_rows: int) -> dict[str, int]:
    """Return tile sizes and warps: items times rows are at most 64 values per thread, and at most
    8192 per program up to 2048 rows."""
    block_b = max(next_power_of_2(num_rows), 16)
    block_w = min(max(8192 // block_b, 4), 64)
    return {
        "BLOCK_B": block_b,
        "BLOCK_W": block_w,
        "num_warps": min(max(block_b * block_w // 2048, 1), 8),
    }


def _launch(query_start_loc: Tensor, seq_lens: Tensor, writes: Tensor, found: SubChunks) -> None:
    tiles = settings(len(seq_lens))
    _kernel[(cdiv(len(found.items), tiles["BLOCK_W"]),)](
        starts_ptr=query_start_loc,
        seq_lens_ptr=seq_lens,
        writes_ptr=writes,
        items_ptr=found.items,
        firsts_ptr=found.firsts,
        num_rows=len(seq_lens),
        num_items=len(found.items),
        SIZE=SIZE,
        **tiles,
    )
