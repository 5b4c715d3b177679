"""Order of tokens by expert, in blocks of one expert each, without the host's knowledge.

A program per expert counts its choices; then a program per expert finds from all counts where its
blocks begin, and writes its choices there in the order of the tokens. As many blocks are given as
can be needed, so that a grid over them depends on shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from kernels.device import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """The choices of a step, as indices of the flat [T * K] experts, in blocks.

    Attributes:
        choices: int32 [B, R]; T * K where a block's rows exceed its expert's choices.
        experts: int32 [B], the expert of each block, -1 after the last.
    """

    choices: Tensor
    experts: Tensor


def sort_by_expert(experts: Tensor, totals: Tensor, block_rows: int) -> ExpertBlocks:
    """Return the choices in blocks of `block_rows` by expert, and in each by token.

    The number of each expert's choices is added to `totals`.

    Args:
        experts: int32 [T, K], contiguous, -1 for none.
        totals: int64 [E], contiguous.
        block_rows: R, a power of two.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride, device or value.
    """
    _check(experts, totals, block_rows)
    num_choices, num_experts = experts.numel(), len(totals)
    num_blocks = most_blocks(num_choices, num_experts, block_rows)
    if not device.runs_triton(experts):
        return reference(experts, totals, block_rows)
    choices = torch.empty(num_blocks, block_rows, dtype=torch.int32, device=experts.device)
    of_blocks = torch.empty(num_blocks, dtype=torch.int32, device=experts.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    if num_blocks:
        _count_kernel[(num_experts,)](
            experts_ptr=experts,
            counts_ptr=counts,
            totals_ptr=totals,
            num_choices=num_choices,
            **settings(),
        )
        _scatter_kernel[(num_experts,)](
            experts_ptr=experts,
            counts_ptr=counts,
            choices_ptr=choices,
            blocks_ptr=of_blocks,
            num_choices=num_choices,
            num_blocks=num_blocks,
            EXPERTS=num_experts,
            BLOCK_E=next_power_of_2(num_experts),
            ROWS=block_rows,
            **settings(),
        )
    return ExpertBlocks(choices, of_blocks)


def most_blocks(num_choices: int, num_experts: int, block_rows: int) -> int:
    """Return the largest number of blocks that can be needed.

    All but one choice of an expert may fill blocks; each chosen expert may have one that is not.
    """
    chosen = min(num_choices, num_experts)
    return (num_choices + chosen * (block_rows - 1)) // block_rows


def reference(experts: Tensor, totals: Tensor, block_rows: int) -> ExpertBlocks:
    """Do the same, expert by expert."""
    flat = experts.flatten()
    num_blocks = most_blocks(len(flat), len(totals), block_rows)
    choices = flat.new_full((num_blocks, block_rows), len(flat))
    of_blocks = flat.new_full((num_blocks,), -1)
    first = 0
    for expert in range(len(totals)):
        found = (flat == expert).nonzero()[:, 0]
        totals[expert] += len(found)
        end = first + cdiv(len(found), block_rows)
        choices[first:end].view(-1)[: len(found)] = found.to(torch.int32)
        of_blocks[first:end] = expert
        first = end
    return ExpertBlocks(choices, of_blocks)


@triton.jit(do_not_specialize=["num_choices"])
def _count_kernel(experts_ptr, counts_ptr, totals_ptr, num_choices, BLOCK: tl.constexpr):
    i_expert = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    b_count = tl.zeros([BLOCK], tl.int32)
    for i in range(0, num_choices, BLOCK):
        b_experts = tl.load(experts_ptr + i + o, mask=i + o < num_choices, other=-1)
        b_count += (b_experts == i_expert).to(tl.int32)
    count = tl.sum(b_count, 0)
    tl.store(counts_ptr + i_expert, count)
    tl.store(totals_ptr + i_expert, tl.load(totals_ptr + i_expert) + count)


@triton.jit(do_not_specialize=["num_choices", "num_blocks"])
def _scatter_kernel(
    experts_ptr,
    counts_ptr,
    choices_ptr,
    blocks_ptr,
    num_choices,
    num_blocks,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_expert = tl.program_id(0)
    o_e = tl.arange(0, BLOCK_E)
    b_counts = tl.load(counts_ptr + o_e, mask=o_e < EXPERTS, other=0)
    b_needs = (b_counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(o_e < i_expert, b_needs, 0), 0)
    end = first + tl.sum(tl.where(o_e == i_expert, b_needs, 0), 0)
    count = tl.sum(tl.where(o_e == i_expert, b_counts, 0), 0)
    o = tl.arange(0, BLOCK)
    o_row = tl.arange(0, ROWS)
    for i in range(first, end):
        tl.store(blocks_ptr + i, i_expert)
    if i_expert == EXPERTS - 1:
        for i in range(end, num_blocks):
            tl.store(blocks_ptr + i, -1)
            tl.store(choices_ptr + i * ROWS + o_row, tl.full([ROWS], num_choices, tl.int32))
    if count > 0:
        # What exceeds the choices is in the last block.
        o_last = (end - 1) * ROWS + o_row
        m_exceeds = o_last - first * ROWS >= count
        tl.store(choices_ptr + o_last, tl.full([ROWS], num_choices, tl.int32), mask=m_exceeds)
        offset = first * ROWS
        for i in range(0, num_choices, BLOCK):
            b_experts = tl.load(experts_ptr + i + o, mask=i + o < num_choices, other=-1)
            m_ours = b_experts == i_expert
            b_ours = m_ours.to(tl.int32)
            b_before = tl.cumsum(b_ours, 0) - b_ours
            tl.store(choices_ptr + offset + b_before, i + o, mask=m_ours)
            offset += tl.sum(b_ours, 0)


def settings() -> dict[str, int]:
    """Return tile size and warps: the choices of a decode step of 128 tokens in one tile."""
    return {"BLOCK": 1024, "num_warps": 4}


def _check(experts: Tensor, totals: Tensor, block_rows: int) -> None:
    check_shape("experts", experts, (None, None))
    check_dtype("experts", experts, torch.int32)
    check_contiguous("experts", experts)
    check_shape("totals", totals, (None,))
    check_dtype("totals", totals, torch.int64)
    check_device("totals", totals, experts.device)
    check_contiguous("totals", totals)
    if not len(totals):
        raise ValueError("totals: must not be empty")
    if block_rows < 1 or block_rows & (block_rows - 1):
        raise ValueError(f"block_rows: must be a power of two (got {block_rows})")
