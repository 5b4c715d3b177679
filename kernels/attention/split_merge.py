"""Merging of the partial results of a sequence's splits by the program that finishes last.

A second launch would cost as much as attention itself on a small model, so every program counts
itself after writing its partial result, and the one that completes the count merges. Partial
results are float32, so that merging adds no rounding; they are small compared with the keys they
represent and stay in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Base-2 logarithm of zero weight; unlike -inf it can be subtracted from itself.
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def merge_when_last(
    partial_ptr,
    lse_ptr,
    out_ptr,
    arrivals_ptr,
    arrivals_stride,
    out_head_stride,
    first_work,
    i_split,
    num_splits,
    i_first_head,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FAN_IN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Count this split's program and, if it is the last, merge the sequence's splits into `out`.

    FAN_IN adjacent splits are merged by the last of them to finish. If a sequence has more splits,
    their result replaces that of the first, and the last merging program merges these results.

    Args:
        partial_ptr: float32 [W, num_heads, HEAD_DIM], this split's result written by the caller.
        lse_ptr: float32 [W, num_heads], base-2 log-sum-exp, likewise.
        out_ptr: [H, HEAD_DIM], the sequence's row of the result; stride `out_head_stride` per head.
        arrivals_ptr: int32 [W, ..], counters of this KV head; stride `arrivals_stride` per item.
        first_work, num_splits: the sequence's first work item and its number of work items.
        i_split: this program's split.
        i_first_head: first of this program's GROUP query heads.
    """
    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    m_gd = (o_g < GROUP)[:, None] & (o_d < HEAD_DIM)[None, :]
    p_out = out_ptr + (i_first_head + o_g)[:, None] * out_head_stride + o_d[None, :]
    i_first = first_work.to(tl.int64)
    i_item = i_first + i_split // FAN_IN * FAN_IN
    count = tl.minimum(i_first + num_splits - i_item, FAN_IN).to(tl.int32)
    step = 1
    last = _is_last(arrivals_ptr + i_item * arrivals_stride, count)
    while last:
        b_o, b_lse = _combine(
            partial_ptr, lse_ptr, i_item, step, count, i_first_head, num_heads,
            GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, BLOCK_S,
        )  # fmt: skip
        if count * step >= num_splits:
            tl.store(p_out, b_o.to(out_ptr.dtype.element_ty), mask=m_gd)
            last = False
        else:
            o_part = i_item * num_heads + i_first_head + o_g
            tl.debug_barrier()  # all threads have read the values overwritten next
            tl.store(partial_ptr + o_part[:, None] * HEAD_DIM + o_d[None, :], b_o, mask=m_gd)
            tl.store(lse_ptr + o_part, b_lse, mask=o_g < GROUP)
            i_item = i_first
            count = tl.cdiv(num_splits, FAN_IN)
            step = FAN_IN
            # The counter is that of the second item; the first item's counts its neighbours.
            last = _is_last(arrivals_ptr + (i_first + 1) * arrivals_stride, count)


@triton.jit
def _is_last(arrivals_ptr, expected):
    """Count this program among `expected`; return whether it is the last and so sees all writes.

    The barrier orders every thread's writes before the release by the thread that counts; the
    acquire by that thread precedes all later reads (a barrier follows it). Counters are not reset
    between layers, hence the remainder.
    """
    tl.debug_barrier()
    before = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")
    return before % expected == expected - 1


@triton.jit
def _combine(
    partial_ptr,
    lse_ptr,
    i_item,
    step,
    count,
    i_first_head,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Return the merged result, [BLOCK_G, BLOCK_D] and [BLOCK_G], of `count` items `step` apart.

    The order is fixed, so the result does not depend on which program finishes last. BLOCK_S
    results are loaded at a time; each thread holds the same elements of all of them, so that no
    values move between threads.
    """
    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    m_g = o_g < GROUP
    m_d = o_d < HEAD_DIM
    o_part = i_item * num_heads + i_first_head + o_g
    b_top = tl.full([BLOCK_G], _LOWEST, tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_o = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for i in range(0, count, BLOCK_S):
        for i_s in tl.static_range(BLOCK_S):
            m_s = m_g & (tl.full([BLOCK_G], i + i_s, tl.int32) < count)
            o_s = o_part + (i + i_s) * step * num_heads
            p_part = partial_ptr + o_s[:, None] * HEAD_DIM + o_d[None, :]
            b_part = tl.load(p_part, mask=m_s[:, None] & m_d[None, :], other=0.0)
            b_lse = tl.load(lse_ptr + o_s, mask=m_s, other=_LOWEST)
            b_higher = tl.maximum(b_top, b_lse)
            b_fade = tl.exp2(b_top - b_higher)
            b_weight = tl.exp2(b_lse - b_higher)
            b_o = b_o * b_fade[:, None] + b_part * b_weight[:, None]
            b_sum = b_sum * b_fade + b_weight
            b_top = b_higher
    return b_o / b_sum[:, None], b_top + tl.log2(b_sum)
