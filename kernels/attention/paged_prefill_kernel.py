"""The kernel of paged prefill attention; see `paged_prefill` for the algorithm."""

from __future__ import annotations

import triton
import triton.language as tl

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
    first_token, num_tokens, i_row = _place(i_tile, i_seq, start_ptr, GROUP, BLOCK_M)
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
    b_place = tl.minimum(context + o_row // GROUP, length - 1)
    # Not below 0: a sequence that has ended on the device has no keys and no block table row.
    first_place = tl.maximum(context + i_row // GROUP, 0)
    last_place = tl.minimum(context + (i_row + BLOCK_M - 1) // GROUP, length - 1)
    # Some row attends to keys `begin` to `end`; every row attends to tiles `head` to `tail`.
    begin, head = 0, 0
    tail = (first_place + 1) // BLOCK_N * BLOCK_N
    end = last_place + 1
    b_top = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, since -inf - -inf is NaN
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if window is not None:
        begin = tl.maximum(first_place - window + 1, 0)
        head = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), BLOCK_N) * BLOCK_N, tail)
        b_top, b_sum, b_out = _attend(
            b_q, b_top, b_sum, b_out, b_place, key_ptr, value_ptr, table_ptr,
            begin // BLOCK_N * BLOCK_N, head, begin, end, window, scale * key_scale, soft_cap,
            NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip
    b_top, b_sum, b_out = _attend(
        b_q, b_top, b_sum, b_out, b_place, key_ptr, value_ptr, table_ptr,
        head, tail, begin, tail, window, scale * key_scale, soft_cap,
        NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    b_top, b_sum, b_out = _attend(
        b_q, b_top, b_sum, b_out, b_place, key_ptr, value_ptr, table_ptr,
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

    # Recomputed: keeping the rows' places from above would hold registers through the loops.
    first_token, num_tokens, i_row = _place(i_tile, i_seq, start_ptr, GROUP, BLOCK_M)
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
def _place(i_tile, i_seq, start_ptr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
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
    b_place,
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
            m_s = (i_n + o_n)[None, :] <= b_place[:, None]
            if window is not None:
                m_s &= (i_n + o_n)[None, :] > (b_place - window)[:, None]
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
