"""Split-KV planning of a decode step: keys are divided among programs so that sequences of any
lengths keep every SM busy (Dao et al., "Flash-Decoding", 2023).

A sequence's keys are cut into splits of equal size; each split, or padding row, is one work item.
The split size is the smallest multiple of 64 keys for which the work items of all sequences fit
into W. It depends on the lengths, which are read on the device; W and all shapes do not, so that
planning can be captured in a CUDA graph. One plan serves all layers with the same sliding window.

W is at least the number of sequences B, which is enough: with a split size s of at least
keys / (W - B), or of the longest sequence, sum max(1, ceil(len / s)) <= W, since each term is at
most 1 + len / s. No term grows with s, so bisection finds the smallest s that fits.

Each program repeats this short search and writes its own part of the work items.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device as devices
from kernels.checks import check_contiguous, check_dtype, check_shape
from kernels.device import cdiv, next_power_of_2

# Split sizes are multiples of this, as of the cache's block sizes and most of attention's tiles.
# Reading a smaller split would take less time than merging its result.
STEP = 64
# Results that one program merges. Two rounds merge FAN_IN^2 splits; no sequence has more.
FAN_IN = 16
# Resident programs per SM, if attention's tiles leave room for them: enough bytes in flight to be
# bound by memory bandwidth, and enough programs to hide each other's latency.
PROGRAMS_PER_SM = 4
_INT32_MAX = 2**31 - 1


class SplitPlan(NamedTuple):
    """The work items of one step; valid for the lengths that it was made from.

    Attributes:
        work_items: int32 [W, 5]: sequence (-1: idle), first key, end key, first work item of the
            sequence, number of work items of the sequence. The items of a sequence are adjacent
            and in the order of their keys.
        arrivals: int32 [W, Hkv], zero: attention's counters of finished programs. A call leaves
            every counter at a multiple of its expected count, so that the next layer can use it.
        num_sequences: B.
        sliding_window: keys that a query attends to, its own included; None for all.
    """

    work_items: Tensor
    arrivals: Tensor
    num_sequences: int
    sliding_window: int | None


def num_work_items(num_sequences: int, num_kv_heads: int, device: torch.device) -> int:
    """Return W, the work items to plan for.

    As many programs as are resident on the SMs of `device`: further programs would wait for others
        to
    end. At least half of that beyond one item per sequence, so that a long sequence among many
    short ones can be split.
    """
    resident = PROGRAMS_PER_SM * devices.limits(device).num_sms // num_kv_heads
    return max(resident, num_sequences + resident // 2, 1)


def plan_splits(
    seq_lens: Tensor,
    num_work_items: int,
    num_kv_heads: int,
    *,
    sliding_window: int | None = None,
) -> SplitPlan:
    """Return the plan of a step for sequences of `seq_lens` keys, computed on their device.

    Args:
        seq_lens: int32 [B], contiguous; 0 for a padding row. Their sum is below 2^31.
        num_work_items: W, at least B; see the function of this name.
        num_kv_heads: at least the KV heads of the layers that use the plan.
        sliding_window: with w, a sequence's last query attends to its last w keys only.

    Raises:
        ValueError: an argument has a wrong shape, dtype or stride, or is out of range.
    """
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_shape("seq_lens", seq_lens, (None,))
    check_contiguous("seq_lens", seq_lens)
    if num_work_items < max(len(seq_lens), 1):
        raise ValueError(
            f"num_work_items: must be at least the number of sequences, {len(seq_lens)}, and at "
            f"least 1 (got {num_work_items})"
        )
    if num_kv_heads < 1:
        raise ValueError(f"num_kv_heads: must be at least 1 (got {num_kv_heads})")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window: must be at least 1 (got {sliding_window})")
    if not devices.runs_triton(seq_lens):
        return reference(seq_lens, num_work_items, num_kv_heads, sliding_window=sliding_window)
    plan = SplitPlan(
        work_items=seq_lens.new_empty(num_work_items, 5),
        arrivals=seq_lens.new_empty(num_work_items, num_kv_heads),
        num_sequences=len(seq_lens),
        sliding_window=sliding_window,
    )
    _launch(seq_lens, plan)
    return plan


def reference(
    seq_lens: Tensor,
    num_work_items: int,
    num_kv_heads: int,
    *,
    sliding_window: int | None = None,
) -> SplitPlan:
    """Return the plan, found by trying split sizes in turn; reads the lengths on the host."""
    lengths = seq_lens.tolist()
    starts = [max(0, length - (sliding_window or length)) for length in lengths]
    pairs = list(zip(starts, lengths, strict=True))
    split_size = STEP
    while True:
        counts = [max(1, -(-(length - start) // split_size)) for start, length in pairs]
        if sum(counts) <= num_work_items and max(counts, default=1) <= FAN_IN**2:
            break
        split_size += STEP
    items: list[list[int]] = []
    for row, ((start, length), count) in enumerate(zip(pairs, counts, strict=True)):
        first = len(items)
        items += [
            [row, begin, min(begin + split_size, length), first, count]
            for begin in range(start, start + count * split_size, split_size)
        ]
    items += [[-1, 0, 0, 0, 0]] * (num_work_items - len(items))
    return SplitPlan(
        work_items=seq_lens.new_tensor(items),
        arrivals=seq_lens.new_zeros(num_work_items, num_kv_heads),
        num_sequences=len(lengths),
        sliding_window=sliding_window,
    )


# Not specialised on the number of sequences: another batch size must not recompile.
@triton.jit(
    do_not_specialize=["num_sequences", "num_work_items"],
    do_not_specialize_on_alignment=["seq_lens_ptr"],
)
def _kernel(
    seq_lens_ptr,
    work_items_ptr,
    arrivals_ptr,
    num_sequences,
    num_work_items,
    num_kv_heads,
    window,
    STEP: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    o_b = tl.arange(0, BLOCK_B)
    m_b = o_b < num_sequences
    b_lens = tl.load(seq_lens_ptr + o_b, mask=m_b, other=0)
    b_keys = tl.minimum(b_lens, window)  # [BLOCK_B]
    total, longest = tl.sum(b_keys), tl.max(b_keys)
    extra = tl.maximum(num_work_items - num_sequences, 1)

    # Bisection in steps of STEP; `high` always fits.
    low = tl.maximum(tl.cdiv(total, num_work_items), tl.cdiv(longest, MAX_SPLITS))
    low = tl.maximum(tl.cdiv(low, STEP), 1)
    high = tl.maximum(tl.cdiv(tl.minimum(tl.cdiv(total, extra), longest), STEP), low)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(_count(b_keys, m_b, middle * STEP)) <= num_work_items
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    split_size = low * STEP

    b_counts = _count(b_keys, m_b, split_size)
    b_ends = tl.cumsum(b_counts)
    b_firsts = b_ends - b_counts
    o_w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    m_w = o_w < num_work_items
    m_own = (b_firsts[None, :] <= o_w[:, None]) & (o_w[:, None] < b_ends[None, :])
    b_own = m_own.to(tl.int32)  # [BLOCK_W, BLOCK_B], one at most in each row
    b_first = tl.sum(b_own * b_firsts[None, :], 1)
    b_count = tl.sum(b_own * b_counts[None, :], 1)
    b_len = tl.sum(b_own * b_lens[None, :], 1)
    b_row = tl.sum(b_own * (o_b + 1)[None, :], 1) - 1
    b_start = tl.maximum(b_len - window, 0) + (o_w - b_first) * split_size
    b_start = tl.where(b_row < 0, 0, b_start)
    p_item = work_items_ptr + o_w * 5
    tl.store(p_item, b_row, mask=m_w)
    tl.store(p_item + 1, b_start, mask=m_w)
    tl.store(p_item + 2, tl.minimum(b_start + split_size, b_len), mask=m_w)
    tl.store(p_item + 3, b_first, mask=m_w)
    tl.store(p_item + 4, b_count, mask=m_w)

    o_h = tl.arange(0, BLOCK_H)
    p_arrivals = arrivals_ptr + o_w[:, None] * num_kv_heads + o_h[None, :]
    b_zeros = tl.zeros([BLOCK_W, BLOCK_H], tl.int32)
    tl.store(p_arrivals, b_zeros, mask=m_w[:, None] & (o_h < num_kv_heads)[None, :])


@triton.jit
def _count(b_keys, m_b, split_size):
    """Return the number of work items of each sequence, 0 beyond the last one."""
    return tl.where(m_b, tl.maximum(tl.cdiv(b_keys, split_size), 1), 0)


def settings(num_sequences: int) -> dict[str, int]:
    """Return tile sizes and warps: items times sequences are at most 64 values per thread, and at
    most 8192 per program up to 2048 sequences."""
    block_b = max(next_power_of_2(num_sequences), 16)
    block_w = min(max(8192 // block_b, 4), 64)
    return {
        "BLOCK_B": block_b,
        "BLOCK_W": block_w,
        "num_warps": min(max(block_b * block_w // 2048, 1), 8),
    }


def _launch(seq_lens: Tensor, plan: SplitPlan) -> None:
    tiles = settings(plan.num_sequences)
    num_items, num_kv_heads = plan.arrivals.shape
    _kernel[(cdiv(num_items, tiles["BLOCK_W"]),)](
        seq_lens_ptr=seq_lens,
        work_items_ptr=plan.work_items,
        arrivals_ptr=plan.arrivals,
        num_sequences=plan.num_sequences,
        num_work_items=num_items,
        num_kv_heads=num_kv_heads,
        window=plan.sliding_window or _INT32_MAX,
        STEP=STEP,
        MAX_SPLITS=FAN_IN**2,
        BLOCK_H=next_power_of_2(num_kv_heads),
        **tiles,
    )
