"""Merging of the partial results that the splits of a sequence leave, by whoever comes last.

No second kernel is launched, which on a small model would cost as much as the attention itself:
every program that has written its partial result counts itself, and the one that finds all others
counted merges. Partial results are float32, so that merging adds no rounding of its own; they are
small beside the keys they stand for, and pass through the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Logarithm of no weight; unlike -inf it can be subtracted from itself.
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

    FAN_IN adjacent splits are merged by the last of them. Where a sequence has more, their result
    takes the place of the first's, and the last to have merged so merges these results.

    Args:
        partial_ptr: float32 [W, num_heads, HEAD_DIM], written for this split by the caller.
        lse_ptr: float32 [W, num_heads], base-2 logarithms of the sums of weights, likewise.
        out_ptr: [H, HEAD_DIM], the sequence's row of the result; heads lie `out_head_stride` apart.
        arrivals_ptr: int32 [W, ..], counts of this KV head; items lie `arrivals_stride` apart.
        first_work, num_splits: first work item of the sequence, and how many it has.
        i_split: this program's among them.
        i_first_head: first of the GROUP query heads of this program.
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
            tl.debug_barrier()  # all threads have read what is overwritten now
            tl.store(partial_ptr + o_part[:, None] * HEAD_DIM + o_d[None, :], b_o, mask=m_gd)
            tl.store(lse_ptr + o_part, b_lse, mask=o_g < GROUP)
            i_item = i_first
            count = tl.cdiv(num_splits, FAN_IN)
            step = FAN_IN
            # Counted in the place of the second item; that of the first counts its neighbours.
            last = _is_last(arrivals_ptr + (i_first + 1) * arrivals_stride, count)


@triton.jit
def _is_last(arrivals_ptr, expected):
    """Count this program among `expected`; tell whether it is the last, and so sees what all wrote.

    The barrier puts what every thread wrote before the release by the thread that counts, and the
    acquire by that thread comes before what any reads next (a barrier follows it). Counts go on
    from layer to layer, hence the remainder.
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
    """Return as one, [BLOCK_G, BLOCK_D] and [BLOCK_G], the results of `count` items, `step` apart.

    Always in the same order: the result does not depend on who comes last. BLOCK_S results are
    loaded at a time; each thread has the same places of all, so that none is passed on.
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
