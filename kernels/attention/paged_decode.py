"""Paged decode attention: one query per sequence over the paged KV cache.

Split-KV with an online softmax (Dao et al., "Flash-Decoding", 2023; Milakov and Gimelshein, 2018).
One program computes all query heads of one KV head for one work item of a `SplitPlan`, a range of
keys of one sequence, so that each key and value is read once. The last program of a sequence to
finish merges the partial results of its splits, so one launch is enough.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import dependent_launch, device
from kernels.attention.paged_cache import (
    BLOCK_SIZES,
    FP8,
    MAX_GROUP,
    check_caches,
    check_query,
    check_scale,
)
from kernels.attention.sinks import check_sinks, softmax_with_sinks
from kernels.attention.split_merge import merge_when_last
from kernels.attention.split_plan import FAN_IN, PROGRAMS_PER_SM, SplitPlan
from kernels.checks import check_device, check_dtype, check_last_stride, check_shape
from kernels.dependent_launch import start_next, wait
from kernels.device import next_power_of_2


def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    plan: SplitPlan,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * q k) v for the last token of each sequence, softmax in float32.

    Query head h reads KV head h // (H / Hkv). With an fp8 cache both products are in float16,
    which represents fp8 values exactly; queries are clamped to +-65504.

    Args:
        query: float [B, H, D]; the last dimension is contiguous.
        key_cache, value_cache: [num_blocks, block_size, Hkv, D], contiguous, block_size 16, 32 or
            64; of the dtype of `query`, or float8_e4m3fn. It already holds the last token's key.
        block_tables: int32 [B, max_blocks], block ids of each sequence in order; entries whose keys
            are not read may be anything. The last dimension is contiguous.
        seq_lens: int32 [B], keys of each sequence; 0 for a padding row.
        plan: from `plan_splits` for these `seq_lens`; it also carries the sliding window.
        scale: factor of the scores.
        soft_cap: with c, scores s become c * tanh(s / c).
        sinks: float32 [H], contiguous: a score of each head that takes part in the softmax, and has
            no value (Xiao et al., 2023).
        key_scale, value_scale: float32 [Hkv], scales of an fp8 cache's keys and values.
        out: where to write the result, like `query`; its last dimension is contiguous.

    Returns:
        [B, H, D] in the dtype of `query`, `out` if given; zeros in padding rows.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    check_query(query, out)
    _check_cache(query, key_cache, value_cache, key_scale, value_scale)
    _check_tables(query, key_cache, block_tables, seq_lens, plan)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: must be positive (got {soft_cap})")
    check_sinks(query, sinks)
    if not device.runs_triton(query):
        return out.copy_(
            reference(
                query,
                key_cache,
                value_cache,
                block_tables,
                seq_lens,
                plan.sliding_window,
                scale=scale,
                soft_cap=soft_cap,
                sinks=sinks,
                key_scale=key_scale,
                value_scale=value_scale,
            )
        )
    if query.numel():
        _launch(
            query,
            key_cache,
            value_cache,
            block_tables,
            plan,
            scale,
            soft_cap,
            sinks,
            key_scale,
            value_scale,
            out,
        )
    return out


def reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    sliding_window: int | None,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Return the attention in float32, one sequence at a time; reads lengths on the host."""
    num_kv_heads, block_size = key_cache.shape[2], key_cache.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    for row, length in enumerate(seq_lens.tolist()):
        if not length:
            continue
        start = 0 if sliding_window is None else max(0, length - sliding_window)
        position = torch.arange(start, length, device=query.device)
        blocks = block_tables[row, position // block_size].long()
        slots = blocks, position % block_size
        keys = _widen(key_cache[slots], key_scale)  # [length - start, Hkv, D]
        values = _widen(value_cache[slots], value_scale)
        q = query[row].float().unflatten(0, (num_kv_heads, -1))
        scores = torch.einsum("hgd,khd->hgk", q, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = softmax_with_sinks(
            scores, None if sinks is None else sinks.view(num_kv_heads, -1)
        )
        out[row] = torch.einsum("hgk,khd->hgd", weights, values).flatten(0, 1)
    return out


def _widen(stored: Tensor, scale: Tensor | None) -> Tensor:
    return stored.float() if scale is None else stored.float() * scale[:, None]


def _launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    plan: SplitPlan,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    out: Tensor,
) -> None:
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_items = len(plan.work_items)
    group = num_heads // num_kv_heads
    limits = device.limits(query.device)
    tiles = settings(group, head_dim, key_cache.itemsize, limits.shared_memory)
    if key_cache.dtype == FP8:
        key_cache, value_cache = key_cache.view(torch.uint16), value_cache.view(torch.uint16)
    partial = torch.empty(num_items, num_heads, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(num_items, num_heads, dtype=torch.float32, device=query.device)
    decode_kernel[(num_kv_heads, num_items)](
        query_ptr=query,
        key_ptr=key_cache,
        value_ptr=value_cache,
        table_ptr=block_tables,
        work_items_ptr=plan.work_items,
        arrivals_ptr=plan.arrivals,
        key_scale_ptr=key_scale,
        value_scale_ptr=value_scale,
        sink_ptr=sinks,
        partial_ptr=partial,
        lse_ptr=lse,
        out_ptr=out,
        query_row_stride=query.stride(0),
        query_head_stride=query.stride(1),
        table_stride=block_tables.stride(0),
        block_stride=key_cache.stride(0),
        key_stride=key_cache.stride(1),
        arrivals_stride=plan.arrivals.stride(0),
        out_row_stride=out.stride(0),
        out_head_stride=out.stride(1),
        scale=scale,
        soft_cap=soft_cap,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        CONVERTS=device.converts_fp8(query.device),
        FAN_IN=FAN_IN,
        **tiles,
        **dependent_launch.options(query.device),
    )


def _check_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    check_caches(key_cache, value_cache, query, None)
    heads, (block_size, kv_heads) = query.shape[1], key_cache.shape[1:3]
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"key_cache: must have blocks of {BLOCK_SIZES} tokens (got {block_size})")
    if heads % kv_heads or heads // kv_heads not in range(1, MAX_GROUP + 1):
        raise ValueError(
            f"query: its {heads} heads must be 1 to {MAX_GROUP} times the cache's {kv_heads}"
        )
    for name, scales in (("key_scale", key_scale), ("value_scale", value_scale)):
        if (scales is None) == (key_cache.dtype == FP8):
            raise ValueError(
                f"{name}: is required with a float8_e4m3fn cache, and not allowed with another"
            )
        if scales is not None:
            check_scale(name, scales, key_cache)


def _check_tables(
    query: Tensor, key_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, plan: SplitPlan
) -> None:
    for name, table, shape in (
        ("block_tables", block_tables, (len(query), None)),
        ("seq_lens", seq_lens, (len(query),)),
    ):
        check_dtype(name, table, torch.int32)
        check_shape(name, table, shape)
        check_device(name, table, query.device)
        check_last_stride(name, table)
    if plan.num_sequences != len(query):
        raise ValueError(
            f"plan: must be for {len(query)} sequences, as query (got {plan.num_sequences})"
        )
    check_device("plan", plan.work_items, query.device)
    if plan.arrivals.shape[1] < key_cache.shape[2]:
        raise ValueError(
            f"plan: must be for the cache's {key_cache.shape[2]} KV heads or more "
            f"(got {plan.arrivals.shape[1]})"
        )
    if seq_lens.device.type == "cpu" and seq_lens.numel():
        room = block_tables.shape[1] * key_cache.shape[1]
        longest = int(seq_lens.max())
        if longest > room:
            raise ValueError(
                f"block_tables: must have room for the longest of seq_lens, {longest} keys (got "
                f"{room})"
            )


# Bytes per tile of keys, or of values; `settings` gives the reason.
_TILE_BYTES = 8192
# Values of other splits' partial results loaded at a time: 32 per thread.
_MERGED = 4096
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    work_items_ptr,
    arrivals_ptr,
    key_scale_ptr,
    value_scale_ptr,
    sink_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    query_row_stride,
    query_head_stride,
    table_stride,
    block_stride,
    key_stride,
    arrivals_stride,
    out_row_stride,
    out_head_stride,
    scale,
    soft_cap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CONVERTS: tl.constexpr,
    FAN_IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait(DEPENDENT)
    # Programs of the heads of one work item are adjacent, as their keys are in memory.
    i_head, i_work = tl.program_id(0), tl.program_id(1)
    p_item = work_items_ptr + i_work * 5
    i_row = tl.load(p_item).to(tl.int64)
    start = tl.load(p_item + 1)
    end = tl.load(p_item + 2)
    first_work = tl.load(p_item + 3)
    num_splits = tl.load(p_item + 4)
    if i_row < 0:
        return
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_md = (o_m < GROUP)[:, None] & (o_d < HEAD_DIM)[None, :]
    o_h = i_head * GROUP + o_m
    p_q = query_ptr + i_row * query_row_stride
    b_q = tl.load(p_q + o_h[:, None] * query_head_stride + o_d[None, :], mask=m_md, other=0.0)
    value_scale = 1.0
    if key_scale_ptr is not None:
        scale *= tl.load(key_scale_ptr + i_head)
        value_scale = tl.load(value_scale_ptr + i_head)
    b_o, b_lse = _attend(
        b_q, key_ptr, value_ptr, table_ptr + i_row * table_stride, block_stride, key_stride,
        i_head, start, end, scale, soft_cap,
        HEAD_DIM, BLOCK_SIZE, CONVERTS, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    start_next(DEPENDENT)
    b_o *= value_scale
    if sink_ptr is not None:  # noqa: SIM102 - decided while compiling, the next one is not
        if i_work == first_work:
            # One more score without a value, in the first split alone.
            b_sink = tl.load(sink_ptr + o_h, mask=o_m < GROUP, other=0.0) * _LOG2E
            b_higher = tl.maximum(b_lse, b_sink)
            b_total = tl.exp2(b_lse - b_higher) + tl.exp2(b_sink - b_higher)
            b_o *= (tl.exp2(b_lse - b_higher) / b_total)[:, None]
            b_lse = b_higher + tl.log2(b_total)

    p_out = out_ptr + i_row * out_row_stride
    if num_splits == 1:
        p_o = p_out + o_h[:, None] * out_head_stride + o_d[None, :]
        tl.store(p_o, b_o.to(out_ptr.dtype.element_ty), mask=m_md)
    else:
        num_heads = tl.num_programs(0) * GROUP
        o_part = i_work.to(tl.int64) * num_heads + o_h
        tl.store(partial_ptr + o_part[:, None] * HEAD_DIM + o_d[None, :], b_o, mask=m_md)
        tl.store(lse_ptr + o_part, b_lse, mask=o_m < GROUP)
        merge_when_last(
            partial_ptr, lse_ptr, p_out, arrivals_ptr + i_head, arrivals_stride, out_head_stride,
            first_work, i_work - first_work, num_splits, i_head * GROUP, num_heads,
            GROUP, HEAD_DIM, FAN_IN, BLOCK_G, BLOCK_D, BLOCK_S,
        )  # fmt: skip


@triton.jit
def _attend(
    b_q,
    key_ptr,
    value_ptr,
    table_ptr,
    block_stride,
    key_stride,
    i_head,
    start,
    end,
    scale,
    soft_cap,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CONVERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the attention of b_q [BLOCK_M, BLOCK_D] to the keys from `start` to `end`, and the
    base-2 log-sum-exp of its scores: zeros and -inf if there is no key.

    An fp8 cache is loaded as pairs of bytes, since matrix instructions take 16-bit elements: even
    and odd dimensions are converted separately and give two products of half the depth.
    """
    FP8: tl.constexpr = key_ptr.dtype.element_ty == tl.uint16
    PARTS: tl.constexpr = 2 if FP8 else 1
    WIDTH: tl.constexpr = HEAD_DIM // PARTS
    BLOCK_C: tl.constexpr = BLOCK_D // PARTS
    if FP8:
        b_q = tl.clamp(b_q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
        b_q, b_q_odd = tl.split(tl.reshape(b_q, [BLOCK_M, BLOCK_C, 2]))
        b_o_odd = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    b_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Columns are reduced after the loop: one cross-warp reduction fewer per tile.
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    o_c = tl.arange(0, BLOCK_C)
    p_k = key_ptr + i_head * WIDTH + o_c[None, :]
    p_v = value_ptr + i_head * WIDTH + o_c[None, :]
    # Block ids are loaded one tile ahead. Loaded in the same iteration they would form a pipeline
    # stage of their own and leave only half of the buffers for keys and values.
    o_n = start + tl.arange(0, BLOCK_N)
    b_blocks = tl.load(table_ptr + o_n // BLOCK_SIZE, mask=o_n < end, other=0)
    # One loop with masked loads, so that the last tile is prefetched like the others.
    for i_n in range(start, end, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        m_nc = m_n[:, None] & (o_c < WIDTH)[None, :]
        o_key = b_blocks.to(tl.int64) * block_stride + o_n % BLOCK_SIZE * key_stride
        b_k = tl.load(p_k + o_key[:, None], mask=m_nc, other=0)  # [BLOCK_N, BLOCK_C]
        if FP8:
            b_k, b_k_odd = _unpack(b_k, CONVERTS)
            b_s = tl.dot(b_q_odd, tl.trans(b_k_odd), tl.dot(b_q, tl.trans(b_k)))
        else:
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision="tf32x3")
        if soft_cap is None:
            b_s *= scale * _LOG2E  # [BLOCK_M, BLOCK_N]
        else:
            b_s *= 2.0 * _LOG2E * scale / soft_cap
            b_e = tl.exp2(-tl.abs(b_s))
            b_tanh = (1.0 - b_e) / (1.0 + b_e)  # tanh of the magnitude
            b_s = tl.where(b_s < 0, -b_tanh, b_tanh) * (soft_cap * _LOG2E)
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_higher = tl.maximum(b_top, tl.max(b_s, 1))
        b_fade = tl.exp2(b_top - b_higher)
        b_p = tl.exp2(b_s - b_higher[:, None])
        b_sum = b_sum * b_fade[:, None] + b_p
        b_v = tl.load(p_v + o_key[:, None], mask=m_nc, other=0)
        b_p = b_p.to(b_q.dtype)
        if FP8:
            b_v, b_v_odd = _unpack(b_v, CONVERTS)
            b_o_odd = tl.dot(b_p, b_v_odd, b_o_odd * b_fade[:, None])
        b_o = tl.dot(b_p, b_v, b_o * b_fade[:, None], input_precision="tf32x3")
        b_top = b_higher
        o_n += BLOCK_N
        b_blocks = tl.load(table_ptr + o_n // BLOCK_SIZE, mask=o_n < end, other=0)
    if FP8:
        b_o = tl.reshape(tl.join(b_o, b_o_odd), [BLOCK_M, BLOCK_D])
    b_total = tl.sum(b_sum, 1)
    b_total = tl.where(b_total == 0, 1.0, b_total)
    return b_o / b_total[:, None], b_top + tl.log2(b_total)


@triton.jit
def _unpack(b_pairs, CONVERTS: tl.constexpr):
    """Return the low and the high bytes, e4m3fn, as float16."""
    if CONVERTS:
        # Converting single bytes and repacking takes Triton 632 instructions per tile, this 411.
        b_low, b_high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bytes;
            .reg .b16 low, high;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {low, high}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=r,=r,r",
            [b_pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        # Sign, exponent and fraction shifted into float16's fields give a number whose exponent is
        # read with bias 15 instead of 7. NaN becomes 480.
        b_low = ((b_pairs & 0x80) << 8) | ((b_pairs & 0x7F) << 7)
        b_high = (b_pairs & 0x8000) | ((b_pairs & 0x7F00) >> 1)
        b_low = b_low.to(tl.float16, bitcast=True) * 256.0
        b_high = b_high.to(tl.float16, bitcast=True) * 256.0
    return b_low, b_high


def settings(group: int, head_dim: int, itemsize: int, shared_memory: int) -> dict[str, int | None]:
    """Return tile sizes, warps and pipeline stages.

    Decode is bound by memory, so what counts is the number of bytes in flight. A tile is 8 KiB of
    keys and 8 KiB of values, four 16-byte copies per thread each. Such tiles are buffered three
    deep where a program can have 227 KiB of shared memory, and two deep elsewhere. With 128
    registers per thread (unconstrained, ptxas takes 96 in places and spills) four programs share an
    SM of an A100, H200 or B200; three if heads are 256 wide, two on an L4. While one tile is
    computed the others are in flight: 128 KiB per SM of an H200, of which 4.3 TB/s at a latency of
    0.8 us need 26. Tiles of more than 64 keys would take more registers; float32 takes more too.

    Args:
        group: query heads per KV head.
        head_dim: dimension of a head.
        itemsize: bytes of an element of the cache.
        shared_memory: maximum bytes of shared memory per program.
    """
    block_d = next_power_of_2(head_dim)
    block_g = next_power_of_2(group)
    block_n = min(max(_TILE_BYTES // (block_d * itemsize), 16), 64)
    buffers = shared_memory // PROGRAMS_PER_SM // (2 * block_n * block_d * itemsize)
    return {
        "BLOCK_M": 16,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "BLOCK_G": block_g,
        "BLOCK_S": min(max(_MERGED // (block_g * block_d), 1), FAN_IN),
        "num_warps": 8 if itemsize * block_d > 512 else 4,
        "num_stages": min(max(buffers, 2), 4) + 1,
        "maxnreg": 128 if itemsize < 4 else None,
    }
