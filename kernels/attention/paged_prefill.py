"""Paged prefill attention: causal attention of prompt chunks over the paged KV cache.

FlashAttention-2 (Dao, 2023) over paged keys and values, for chunks of any lengths in one launch.
The rows of a tile are the tokens of a chunk times the query heads that share a KV head: a short
chunk with grouped-query attention still fills a tile, and a key is read once for all heads of its
group. One program computes one tile of one KV head. It finds its sequence on the device, so that
the grid depends on shapes only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.attention.paged_cache import BLOCK_SIZES, FP8, check_caches, check_query, check_scale
from kernels.attention.paged_prefill_tiles import settings
from kernels.attention.sinks import check_sinks, softmax_with_sinks
from kernels.checks import (
    check_contiguous,
    check_device,
    check_dtype,
    check_last_stride,
    check_shape,
)


def paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    is_invariant: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * q k) v of the last tokens of each sequence; softmax in float32.

    The cache already holds the keys and values of these tokens. Query head h reads KV head
    h // (H / Hkv). With an fp8 cache the products are in float16 (float32 for float32 queries).

    Args:
        query: float [T, H, D], one sequence after another; D is contiguous, a multiple of 16 from
            32 to 256.
        key_cache, value_cache: [num_blocks, block_size, Hkv, D], contiguous, of the dtype of
            `query` or float8_e4m3fn; blocks of 16, 32 or 64.
        block_tables: int32 [B, max_blocks], rows contiguous: a column for every key of the longest
            sequence. Entries of keys that have left the sliding window may be anything.
        query_start_loc: int32 [B + 1], contiguous: sequence i owns the tokens from its entry to the
            next, possibly none. Nothing is written for tokens before the first entry and after the
            last.
        seq_lens: int32 [B], contiguous: tokens of each sequence including those of this step.
        scale: positive factor of the scores.
        sliding_window: with w, position p attends to p - w + 1 .. p; with None, to 0 .. p.
        soft_cap: with c, scores s become c * tanh(s / c).
        sinks: float32 [H], contiguous: a score of each head that takes part in the softmax, and has
            no value.
        key_scale, value_scale: float32 [Hkv], positive, with fp8 caches only: key = stored * scale.
        is_invariant: have a token's result depend, to the last bit, on its own query and keys
            alone: not on its chunk, nor on the other sequences.
        out: where to write the result, like `query` except for strides; a new tensor by default.

    Returns:
        [T, H, D] in the dtype of `query`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride, device or value, or is missing.
    """
    check_query(query, out)
    _check_caches(query, key_cache, value_cache, key_scale, value_scale)
    _check_sequences(query, block_tables, query_start_loc, seq_lens)
    _check_numbers(scale, sliding_window, soft_cap)
    check_sinks(query, sinks)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not device.runs_triton(query):
        tokens = slice(int(query_start_loc[0]), int(query_start_loc[-1]))
        out[tokens] = reference(
            query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale=scale,
            sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks,
            key_scale=key_scale, value_scale=value_scale,
        )[tokens]  # fmt: skip
    elif query.numel() and len(seq_lens):
        _launch(
            query, key_cache, value_cache, block_tables, query_start_loc, seq_lens,
            scale, sliding_window, soft_cap, sinks, key_scale, value_scale, is_invariant, out,
        )  # fmt: skip
    return out


def reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Return the attention computed in float32 throughout; zeros for tokens of no sequence."""
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for i, length in enumerate(lengths):
        tokens = slice(starts[i], starts[i + 1])
        first = length - (starts[i + 1] - starts[i])
        low = 0 if sliding_window is None else max(0, first - sliding_window + 1)
        keys = _gather(key_cache, block_tables[i], low, length, key_scale)
        values = _gather(value_cache, block_tables[i], low, length, value_scale)
        key = torch.arange(low, length, device=query.device)
        position = torch.arange(first, length, device=query.device)[:, None]
        seen = key <= position
        if sliding_window is not None:
            seen &= key > position - sliding_window
        q = query[tokens].float().unflatten(1, (keys.shape[1], -1))  # [n, Hkv, G, D]
        scores = torch.einsum("nhgd,khd->hgnk", q, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~seen, float("-inf"))
        columns = None if sinks is None else sinks.view(*q.shape[1:3], 1)
        weights = softmax_with_sinks(scores, columns)
        out[tokens] = torch.einsum("hgnk,khd->nhgd", weights, values).flatten(1, 2)
    return out


def _gather(cache: Tensor, table: Tensor, low: int, high: int, scale: Tensor | None) -> Tensor:
    """Return the keys or values of positions `low` to `high`, float32 [high - low, Hkv, D]."""
    positions = torch.arange(low, high, device=cache.device)
    size = cache.shape[1]
    rows = cache[table[positions // size].long(), positions % size].float()
    return rows if scale is None else rows * scale[:, None]


def _launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    is_invariant: bool,
    out: Tensor,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    limits = device.limits(query.device)
    tiles = settings(
        num_tokens * group, len(seq_lens), num_kv_heads, head_dim,
        query.dtype, key_cache.dtype, limits, is_fixed=is_invariant,
    )  # fmt: skip
    if key_cache.dtype == FP8 and limits.capability < (8, 9):
        key_cache, value_cache = key_cache.view(torch.int8), value_cache.view(torch.int8)
    num_tiles = num_tokens * group // tiles["BLOCK_M"] + len(seq_lens)
    prefill_kernel[(num_tiles * num_kv_heads,)](
        query_ptr=query,
        key_ptr=key_cache,
        value_ptr=value_cache,
        table_ptr=block_tables,
        start_ptr=query_start_loc,
        seq_lens_ptr=seq_lens,
        key_scale_ptr=key_scale,
        value_scale_ptr=value_scale,
        sink_ptr=sinks,
        out_ptr=out,
        query_stride=query.stride(0),
        query_head_stride=query.stride(1),
        out_stride=out.stride(0),
        out_head_stride=out.stride(1),
        table_stride=block_tables.stride(0),
        num_sequences=len(seq_lens),
        window=sliding_window,
        scale=scale,
        soft_cap=soft_cap,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        # A token's tile may be masked for the sake of others, which is another loop: it must not
        # fuse other operations.
        enable_fp_fusion=not is_invariant,
        **tiles,
    )


def _check_caches(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    check_caches(key_cache, value_cache, query, None)
    _, block_size, num_kv_heads, _ = key_cache.shape
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"key_cache: blocks must be of {BLOCK_SIZES} keys (got {block_size})")
    if not num_kv_heads or query.shape[1] % num_kv_heads:
        raise ValueError(
            f"query: its {query.shape[1]} heads must be a multiple of the cache's {num_kv_heads}"
        )
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if (scale is not None) != (key_cache.dtype == FP8):
            raise ValueError(f"{name}: is required with fp8 caches, and not allowed with others")
        if scale is not None:
            check_scale(name, scale, key_cache)


def _check_sequences(
    query: Tensor, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> None:
    check_shape("seq_lens", seq_lens, (None,))
    check_shape("query_start_loc", query_start_loc, (len(seq_lens) + 1,))
    check_shape("block_tables", block_tables, (len(seq_lens), None))
    for name, tensor in (
        ("block_tables", block_tables),
        ("query_start_loc", query_start_loc),
        ("seq_lens", seq_lens),
    ):
        check_dtype(name, tensor, torch.int32)
        check_device(name, tensor, query.device)
    check_last_stride("block_tables", block_tables)
    check_contiguous("query_start_loc", query_start_loc)
    check_contiguous("seq_lens", seq_lens)


def _check_numbers(scale: float, sliding_window: int | None, soft_cap: float | None) -> None:
    for name, number in (
        ("scale", scale),
        ("sliding_window", sliding_window),
        ("soft_cap", soft_cap),
    ):
        if number is not None and number <= 0:
            raise ValueError(f"{name}: must be positive (got {number})")


_LOG2E = tl.constexpr(1.4426950408889634)
_SEARCH = tl.constexpr(128)  # sequences compared at once


# Not specialised on these arguments: another batch size, or another number of rows before its
# chunks, must not recompile.
@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["table_ptr", "start_ptr", "seq_lens_ptr"],
)
def prefill_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    start_ptr,
    seq_lens_ptr,
    key_scale_ptr,
    value_scale_ptr,
    sink_ptr,
    out_ptr,
    query_stride,
    query_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    num_sequences,
    window,
    scale,
    soft_cap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Programs start in the order of their ids: the last tiles of a chunk, which attend to the most
    # keys, come first, and the tiles of one position in all heads are adjacent.
    i_program = tl.program_id(0)
    i_head = i_program % NUM_KV_HEADS
    i_tile = (tl.num_programs(0) - 1 - i_program) // NUM_KV_HEADS
    i_seq = _find_sequence(i_tile, start_ptr, num_sequences, GROUP, BLOCK_M)
    if i_seq < 0:
        return  # tokens before the first sequence
    first_token, num_tokens, i_row = _tile_rows(i_tile, i_seq, start_ptr, GROUP, BLOCK_M)
    if i_row >= num_tokens * GROUP:
        return
    length = tl.load(seq_lens_ptr + i_seq)
    context = length - num_tokens

    o_d = tl.arange(0, BLOCK_D)
    o_row = i_row + tl.arange(0, BLOCK_M)
    m_q = (o_row < num_tokens * GROUP)[:, None] & (o_d < HEAD_DIM)[None, :]
    p_q = query_ptr + (first_token + o_row // GROUP).to(tl.int64) * query_stride
    p_q += (i_head * GROUP + o_row % GROUP) * query_head_stride
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_q, other=0.0)  # [BLOCK_M, BLOCK_D]
    if key_ptr.dtype.element_ty.primitive_bitwidth == 8 and b_q.dtype != tl.float32:
        b_q = tl.clamp(b_q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)

    key_scale, value_scale = 1.0, 1.0
    if key_scale_ptr is not None:
        key_scale = tl.load(key_scale_ptr + i_head)
        value_scale = tl.load(value_scale_ptr + i_head)
        if key_ptr.dtype.element_ty == tl.int8:
            key_scale *= 256.0  # the factor that _widen leaves out
            value_scale *= 256.0
    key_ptr += i_head * HEAD_DIM
    value_ptr += i_head * HEAD_DIM
    table_ptr += i_seq.to(tl.int64) * table_stride

    # Rows past the chunk get the position of its last token: they attend to keys, which avoids NaN.
    b_position = tl.minimum(context + o_row // GROUP, length - 1)
    # Not below 0: a sequence that has ended on the device has no keys and no block table row.
    first_position = tl.maximum(context + i_row // GROUP, 0)
    last_position = tl.minimum(context + (i_row + BLOCK_M - 1) // GROUP, length - 1)
    # Some row attends to keys `begin` to `end`; every row attends to tiles `head` to `tail`.
    begin, head = 0, 0
    tail = (first_position + 1) // BLOCK_N * BLOCK_N
    end = last_position + 1
    b_top = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, since -inf - -inf is NaN
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if window is not None:
        begin = tl.maximum(first_position - window + 1, 0)
        head = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), BLOCK_N) * BLOCK_N, tail)
        b_top, b_sum, b_out = _attend(
            b_q, b_top, b_sum, b_out, b_position, key_ptr, value_ptr, table_ptr,
            begin // BLOCK_N * BLOCK_N, head, begin, end, window, scale * key_scale, soft_cap,
            NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip
    b_top, b_sum, b_out = _attend(
        b_q, b_top, b_sum, b_out, b_position, key_ptr, value_ptr, table_ptr,
        head, tail, begin, tail, window, scale * key_scale, soft_cap,
        NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    b_top, b_sum, b_out = _attend(
        b_q, b_top, b_sum, b_out, b_position, key_ptr, value_ptr, table_ptr,
        tail, end, begin, end, window, scale * key_scale, soft_cap,
        NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, True,
    )  # fmt: skip
    if sink_ptr is not None:
        # One more score, without a value. Maxima are without the factor of the scores.
        factor = scale * key_scale if soft_cap is None else soft_cap
        b_sink = tl.load(sink_ptr + i_head * GROUP + o_row % GROUP)
        b_sum += tl.exp2((b_sink - b_top * factor) * _LOG2E)
    # Without keys the sum of weights is zero.
    b_out *= (value_scale / tl.maximum(b_sum, 1e-30))[:, None]

    # Recomputed: keeping the rows' positions from above would hold registers through the loops.
    first_token, num_tokens, i_row = _tile_rows(i_tile, i_seq, start_ptr, GROUP, BLOCK_M)
    o_row = i_row + tl.arange(0, BLOCK_M)
    m_q = (o_row < num_tokens * GROUP)[:, None] & (o_d < HEAD_DIM)[None, :]
    p_out = out_ptr + (first_token + o_row // GROUP).to(tl.int64) * out_stride
    p_out += (i_head * GROUP + o_row % GROUP) * out_head_stride
    tl.store(p_out[:, None] + o_d[None, :], b_out.to(out_ptr.dtype.element_ty), mask=m_q)


@triton.jit
def _first_tile(i_seq, first_token, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a sequence's first tile: each earlier sequence has its whole tiles and one more."""
    return first_token * GROUP // BLOCK_M + i_seq


@triton.jit
def _find_sequence(i_tile, start_ptr, num_sequences, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the last sequence that starts at `i_tile` or before it; -1 if there is none.

    Compares many sequences at once: each step of a bisection would wait for memory.
    """
    i_seq = -1
    for i in range(0, num_sequences, _SEARCH):
        o_s = i + tl.arange(0, _SEARCH)
        m_s = o_s < num_sequences
        b_start = tl.load(start_ptr + o_s, mask=m_s, other=0)
        m_s &= _first_tile(o_s, b_start, GROUP, BLOCK_M) <= i_tile
        i_seq += tl.sum(m_s.to(tl.int32))
    return i_seq


@triton.jit
def _tile_rows(i_tile, i_seq, start_ptr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a sequence's first token, its number of tokens, and the first row of its `i_tile`.

    The rows of a sequence are its tokens, each with the heads that share a KV head. Loads are
    volatile, so that two calls load twice and keep nothing in registers between them.
    """
    first_token = tl.load(start_ptr + i_seq, volatile=True)
    num_tokens = tl.load(start_ptr + i_seq + 1, volatile=True) - first_token
    i_row = (i_tile - _first_tile(i_seq, first_token, GROUP, BLOCK_M)) * BLOCK_M
    return first_token, num_tokens, i_row


@triton.jit
def _attend(
    b_q,
    b_top,
    b_sum,
    b_out,
    b_position,
    key_ptr,
    value_ptr,
    table_ptr,
    start,
    stop,
    begin,
    end,
    window,
    scale,
    soft_cap,
    KEY_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return maxima, sums and outputs after the tiles from `start` to `stop`.

    Keys before `begin` and from `end` on do not exist or have been freed: MASKED tiles skip them.
    """
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_kv = (o_n % BLOCK_SIZE)[:, None] * KEY_STRIDE + o_d[None, :]
    p_keys, p_values = key_ptr + o_kv, value_ptr + o_kv
    # Block ids are loaded one tile ahead. Loaded in the same iteration they would form a pipeline
    # stage of their own and leave only half of the buffers for keys and values.
    b_block = _look_up(table_ptr, start, end, BLOCK_SIZE, BLOCK_N, MASKED)
    for i_n in range(start, stop, BLOCK_N):
        o_block = b_block.to(tl.int64)[:, None] * (BLOCK_SIZE * KEY_STRIDE)
        if BLOCK_N < BLOCK_SIZE:
            o_block += i_n % BLOCK_SIZE * KEY_STRIDE
        m_kv = (o_d < HEAD_DIM)[None, :]
        if MASKED:
            m_kv &= ((i_n + o_n >= begin) & (i_n + o_n < end))[:, None]
        b_k = _widen(tl.load(p_keys + o_block, mask=m_kv, other=0.0), b_q.dtype)
        b_v = _widen(tl.load(p_values + o_block, mask=m_kv, other=0.0), b_q.dtype)
        b_block = _look_up(table_ptr, i_n + BLOCK_N, end, BLOCK_SIZE, BLOCK_N, MASKED)

        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        factor = scale * _LOG2E
        if soft_cap is not None:
            b_s = 1.0 - 2.0 / (tl.exp2(b_s * (2.0 * factor / soft_cap)) + 1.0)  # tanh
            factor = soft_cap * _LOG2E
        if MASKED:
            m_s = (i_n + o_n)[None, :] <= b_position[:, None]
            if window is not None:
                m_s &= (i_n + o_n)[None, :] > (b_position - window)[:, None]
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_s, 1))
        b_fade = tl.exp2((b_top - b_new) * factor)
        b_p = tl.exp2(b_s * factor - (b_new * factor)[:, None])
        b_sum = b_sum * b_fade + tl.sum(b_p, 1)
        b_out = tl.dot(b_p.to(b_q.dtype), b_v, b_out * b_fade[:, None], input_precision="ieee")
        b_top = b_new
    return b_top, b_sum, b_out


@triton.jit
def _look_up(
    table_ptr,
    i_n,
    end,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the block id of each key of a tile, [BLOCK_N]; only MASKED tiles go beyond `end`."""
    o_n = tl.arange(0, BLOCK_N)
    STEP: tl.constexpr = BLOCK_SIZE if MASKED else BLOCK_N  # keys that exist together
    m_n = i_n + o_n // STEP * STEP < end
    return tl.load(table_ptr + i_n // BLOCK_SIZE + o_n // BLOCK_SIZE, mask=m_n, other=0)


@triton.jit
def _widen(b_x, DTYPE: tl.constexpr):
    """Return fp8 as DTYPE, all else unchanged; fp8 passed as int8 comes out 256 times too small.

    It is passed as int8 on GPUs without an fp8 conversion: sign-extended and shifted into float16's
    fields, its exponent, which has bias 7, is read with bias 15.
    """
    if b_x.dtype == tl.int8:
        b_x = ((b_x.to(tl.int16) << 7) & ~0x4000).to(tl.float16, bitcast=True)
    return b_x.to(DTYPE)
