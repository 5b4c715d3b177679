"""The gated delta rule in sub-chunks on a GPU (Yang et al., 2024): rows of several tokens.

Within a sub-chunk of up to 64 tokens let G be the cumulated decays, K and V its keys and values.
With A[i, j] = beta_i exp(G_i - G_j) k_i^T k_j for j < i and X = (I + A)^-1, the values by which
the state is corrected are V' = U - W S, where U = X (beta V), W = X (beta exp(G) K) and S is the
state before it. The state behind it is exp(G_n) S + sum_i exp(G_n - G_i) k_i v'_i^T, a token's
result exp(G_i) S^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i^T k_j) v'_j. No exponent is positive.

Launches, each behind the one before it:

- `_convolve_kernel`: a sub-chunk's tokens of a head of queries, keys or values: convolution, SiLU,
  norm of queries and keys;
- `_local_kernel`: (sub-chunk, head): gates, X in blocks of 16 x 16 in float32, W and U;
- `_states_kernel`: (row, head, 32 of V): one sub-chunk after the other; the state stays in float32
  in registers. Writes V', the state before each sub-chunk, rounded, and states at the end and at
  the positions of saves, in float32. A position within a sub-chunk is as exact as its end;
- `_outputs_kernel`: (sub-chunk, head): results, their norm and gates.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import cdiv, next_power_of_2
from kernels.gated_activation import gate_of
from kernels.state.delta_decode import L2_EPS, gate, sigmoid, softplus
from kernels.state.rings import STEP_ARRAYS, convolve
from kernels.state.states import StateCache, StepStates
from kernels.state.sub_chunks import SIZE, SubChunks

_VALUES = 32  # columns of a state that a program of `_states_kernel` computes


@triton.jit
def _convolve_kernel(
    x_ptr,
    conv_ptr,
    ring_ptr,
    mixed_ptr,
    items_ptr,
    reads_ptr,
    x_stride,
    channel_stride,
    tap_stride,
    ring_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KERNEL: tl.constexpr,
    RING: tl.constexpr,
    L2_EPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    SLABS: tl.constexpr = SIZE // TOKENS
    p_item = items_ptr + tl.program_id(1) // SLABS * 5
    skipped = tl.program_id(1) % SLABS * TOKENS  # of the sub-chunk
    i_row = tl.load(p_item)
    first = tl.load(p_item + 1) + skipped
    num_tokens = tl.load(p_item + 2) - first
    if (i_row >= 0) & (num_tokens > 0):
        position = tl.load(p_item + 3) + skipped
        start = tl.load(p_item + 4)
        i_head = tl.program_id(0)  # queries, then keys, then values
        is_value = i_head >= 2 * KEY_HEADS
        o = tl.arange(0, BLOCK)[None, :]
        values = 2 * KEY_HEADS * KEY + (i_head - 2 * KEY_HEADS) * VALUE
        o_channel = tl.where(is_value, values, i_head * KEY) + o
        m_channel = o < tl.where(is_value, VALUE, KEY)
        o_token = tl.arange(0, TOKENS)[:, None]
        m = (o_token < num_tokens) & m_channel
        b_sum = convolve(
            x_ptr,
            ring_ptr + tl.load(reads_ptr + i_row).to(tl.int64) * ring_stride,
            conv_ptr,
            x_stride,
            channel_stride,
            tap_stride,
            position + o_token,
            o_channel,
            m,
            m_channel,
            first - (position - start),
            start,
            KERNEL,
            RING,
            CHANNELS,
            False,
        )
        b_x = gate_of(b_sum, "silu")
        b_scale = tl.rsqrt(tl.sum(b_x * b_x, 1) + L2_EPS)
        b_scale *= tl.where(i_head < KEY_HEADS, KEY**-0.5, 1.0)
        b_x *= tl.where(is_value, 1.0, b_scale)[:, None]
        p_mixed = mixed_ptr + first.to(tl.int64) * CHANNELS + (o_token * CHANNELS + o_channel)
        tl.store(p_mixed, b_x.to(mixed_ptr.dtype.element_ty), mask=m)


@triton.jit
def _local_kernel(
    mixed_ptr,
    beta_ptr,
    inputs_ptr,
    decay_ptr,
    bias_ptr,
    decays_ptr,
    w_ptr,
    u_ptr,
    items_ptr,
    beta_stride,
    inputs_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    i_head = tl.program_id(0)
    p_item = items_ptr + tl.program_id(1) * 5
    if tl.load(p_item) >= 0:
        first = tl.load(p_item + 1).to(tl.int64)
        num_tokens = (tl.load(p_item + 2) - first).to(tl.int32)
        # Tokens in 4 groups of 16.
        o_t = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
        m_t = o_t < num_tokens
        p_inputs = inputs_ptr + first * inputs_stride + i_head + o_t * inputs_stride
        b_step = tl.load(p_inputs, mask=m_t, other=0.0).to(tl.float32)
        b_step = softplus(b_step + tl.load(bias_ptr + i_head).to(tl.float32))
        b_g = tl.where(m_t, b_step * tl.load(decay_ptr + i_head), 0.0)
        b_g = tl.reshape(tl.cumsum(tl.reshape(b_g, [64]), 0), [4, 16])
        tl.store(decays_ptr + first * HEADS + i_head + o_t * HEADS, b_g, mask=m_t)
        p_beta = beta_ptr + first * beta_stride + i_head + o_t * beta_stride
        b_beta = sigmoid(tl.load(p_beta, mask=m_t, other=0.0).to(tl.float32))
        b_beta = tl.where(m_t, b_beta, 0.0)

        # The inverses of the diagonal blocks of I + A, row by row; A transposed: [., column, row].
        o_k = tl.arange(0, BLOCK_K)
        p_keys = mixed_ptr + first * CHANNELS + (KEY_HEADS + i_head // (HEADS // KEY_HEADS)) * KEY
        m_keys = m_t[:, :, None] & (o_k < KEY)[None, None, :]
        b_keys = tl.load(p_keys + o_t[:, :, None] * CHANNELS + o_k, mask=m_keys, other=0.0)
        b_a = tl.dot(b_keys, tl.trans(b_keys, (0, 2, 1)), input_precision="ieee")
        o_row, o_column = tl.arange(0, 16)[None, None, :], tl.arange(0, 16)[None, :, None]
        b_a *= b_beta[:, None, :] * tl.exp(tl.minimum(b_g[:, None, :] - b_g[:, :, None], 0.0))
        b_a = tl.where(o_column < o_row, b_a, 0.0)
        b_x = tl.where(o_row == o_column, 1.0, 0.0) + tl.zeros_like(b_a)  # [., row, column]
        for i in range(1, 16):
            b_row = tl.sum(tl.where(o_row == i, b_a, 0.0), 2)  # [4, 16]: A[i, :]
            b_row = tl.sum(b_row[:, :, None] * b_x, 1)
            b_x = tl.where(o_column == i, b_x - b_row[:, None, :], b_x)

        # Those below them.
        b_k0 = _rows(p_keys, 0, num_tokens, KEY, CHANNELS, BLOCK_K)
        b_k1 = _rows(p_keys, 1, num_tokens, KEY, CHANNELS, BLOCK_K)
        b_k2 = _rows(p_keys, 2, num_tokens, KEY, CHANNELS, BLOCK_K)
        b_k3 = _rows(p_keys, 3, num_tokens, KEY, CHANNELS, BLOCK_K)
        b_g0, b_g1, b_g2, b_g3 = _part(b_g, 0), _part(b_g, 1), _part(b_g, 2), _part(b_g, 3)
        b_t0, b_t1 = _part(b_beta, 0), _part(b_beta, 1)
        b_t2, b_t3 = _part(b_beta, 2), _part(b_beta, 3)
        b_x00, b_x11, b_x22, b_x33 = _block(b_x, 0), _block(b_x, 1), _block(b_x, 2), _block(b_x, 3)
        b_a10 = _below(b_k1, b_k0, b_g1, b_g0, b_t1)
        b_a20 = _below(b_k2, b_k0, b_g2, b_g0, b_t2)
        b_a21 = _below(b_k2, b_k1, b_g2, b_g1, b_t2)
        b_a30 = _below(b_k3, b_k0, b_g3, b_g0, b_t3)
        b_a31 = _below(b_k3, b_k1, b_g3, b_g1, b_t3)
        b_a32 = _below(b_k3, b_k2, b_g3, b_g2, b_t3)
        b_x10 = -_dot(b_x11, _dot(b_a10, b_x00))
        b_x21 = -_dot(b_x22, _dot(b_a21, b_x11))
        b_x32 = -_dot(b_x33, _dot(b_a32, b_x22))
        b_x20 = -_dot(b_x22, _dot(b_a20, b_x00) + _dot(b_a21, b_x10))
        b_x31 = -_dot(b_x33, _dot(b_a31, b_x11) + _dot(b_a32, b_x21))
        b_x30 = -_dot(b_x33, _dot(b_a30, b_x00) + _dot(b_a31, b_x10) + _dot(b_a32, b_x20))

        b_e0, b_e1 = b_t0 * tl.exp(b_g0), b_t1 * tl.exp(b_g1)
        b_e2, b_e3 = b_t2 * tl.exp(b_g2), b_t3 * tl.exp(b_g3)
        p_w = w_ptr + (first * HEADS + i_head) * KEY
        STRIDE: tl.constexpr = HEADS * KEY
        b_w = _dot_scaled(b_x00, b_e0, b_k0)
        _store_rows(p_w, 0, num_tokens, b_w, STRIDE, KEY, BLOCK_K)
        b_w = _dot_scaled(b_x10, b_e0, b_k0) + _dot_scaled(b_x11, b_e1, b_k1)
        _store_rows(p_w, 1, num_tokens, b_w, STRIDE, KEY, BLOCK_K)
        b_w = _dot_scaled(b_x20, b_e0, b_k0) + _dot_scaled(b_x21, b_e1, b_k1)
        b_w += _dot_scaled(b_x22, b_e2, b_k2)
        _store_rows(p_w, 2, num_tokens, b_w, STRIDE, KEY, BLOCK_K)
        b_w = _dot_scaled(b_x30, b_e0, b_k0) + _dot_scaled(b_x31, b_e1, b_k1)
        b_w += _dot_scaled(b_x32, b_e2, b_k2) + _dot_scaled(b_x33, b_e3, b_k3)
        _store_rows(p_w, 3, num_tokens, b_w, STRIDE, KEY, BLOCK_K)

        p_v = mixed_ptr + first * CHANNELS + 2 * KEY_HEADS * KEY + i_head * VALUE
        p_u = u_ptr + (first * HEADS + i_head) * VALUE
        ROW: tl.constexpr = HEADS * VALUE
        b_v0 = _rows(p_v, 0, num_tokens, VALUE, CHANNELS, BLOCK_V)
        _store_rows(p_u, 0, num_tokens, _dot_scaled(b_x00, b_t0, b_v0), ROW, VALUE, BLOCK_V)
        b_v1 = _rows(p_v, 1, num_tokens, VALUE, CHANNELS, BLOCK_V)
        b_u = _dot_scaled(b_x10, b_t0, b_v0) + _dot_scaled(b_x11, b_t1, b_v1)
        _store_rows(p_u, 1, num_tokens, b_u, ROW, VALUE, BLOCK_V)
        b_v2 = _rows(p_v, 2, num_tokens, VALUE, CHANNELS, BLOCK_V)
        b_u = _dot_scaled(b_x20, b_t0, b_v0) + _dot_scaled(b_x21, b_t1, b_v1)
        b_u += _dot_scaled(b_x22, b_t2, b_v2)
        _store_rows(p_u, 2, num_tokens, b_u, ROW, VALUE, BLOCK_V)
        b_v3 = _rows(p_v, 3, num_tokens, VALUE, CHANNELS, BLOCK_V)
        b_u = _dot_scaled(b_x30, b_t0, b_v0) + _dot_scaled(b_x31, b_t1, b_v1)
        b_u += _dot_scaled(b_x32, b_t2, b_v2) + _dot_scaled(b_x33, b_t3, b_v3)
        _store_rows(p_u, 3, num_tokens, b_u, ROW, VALUE, BLOCK_V)


@triton.jit
def _rows(
    p_rows,
    i_group,
    num_tokens,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the keys, or the values, of a group of 16 tokens."""
    o_t = i_group * 16 + tl.arange(0, 16)[:, None]
    o = tl.arange(0, BLOCK)[None, :]
    return tl.load(p_rows + o_t * STRIDE + o, mask=(o_t < num_tokens) & (o < DIM), other=0.0)


@triton.jit
def _store_rows(
    p_rows,
    i_group,
    num_tokens,
    b_rows,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_t = i_group * 16 + tl.arange(0, 16)[:, None]
    o = tl.arange(0, BLOCK)[None, :]
    b_rows = b_rows.to(p_rows.dtype.element_ty)
    tl.store(p_rows + o_t * STRIDE + o, b_rows, mask=(o_t < num_tokens) & (o < DIM))


@triton.jit
def _part(b_parts, i):
    """Return part i of [4, 16]."""
    return tl.sum(tl.where(tl.arange(0, 4)[:, None] == i, b_parts, 0.0), 0)


@triton.jit
def _block(b_blocks, i):
    """Return block i of [4, 16, 16]."""
    return tl.sum(tl.where(tl.arange(0, 4)[:, None, None] == i, b_blocks, 0.0), 0)


@triton.jit
def _below(b_keys, b_earlier, b_g, b_g_earlier, b_beta):
    """Return the block of A of 16 tokens and 16 earlier ones."""
    b_a = tl.dot(b_keys, tl.trans(b_earlier), input_precision="ieee")
    return b_a * b_beta[:, None] * tl.exp(tl.minimum(b_g[:, None] - b_g_earlier[None, :], 0.0))


@triton.jit
def _dot(b_x, b_y):
    return tl.dot(b_x, b_y, input_precision="ieee")


@triton.jit
def _dot_scaled(b_x, b_factor, b_rows):
    """Return a block of X, its columns scaled, times 16 rows."""
    return tl.dot((b_x * b_factor[None, :]).to(b_rows.dtype), b_rows, input_precision="ieee")


@triton.jit(do_not_specialize_on_alignment=STEP_ARRAYS)
def _states_kernel(
    mixed_ptr,
    decays_ptr,
    w_ptr,
    u_ptr,
    before_ptr,
    state_ptr,
    firsts_ptr,
    starts_ptr,
    seq_lens_ptr,
    reads_ptr,
    writes_ptr,
    saves_ptr,
    state_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    NUM_SAVES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    i_tile, i_head, i_row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts_ptr + i_row)
    num_tokens = tl.load(starts_ptr + i_row + 1) - begin
    length = tl.load(seq_lens_ptr + i_row)
    write = tl.load(writes_ptr + i_row)
    if (length > 0) & (write >= 0) & (num_tokens > 1):
        start = length - num_tokens
        grid = start // SIZE
        i_first = tl.load(firsts_ptr + i_row).to(tl.int64)
        o_t = tl.arange(0, SIZE)
        o_k = tl.arange(0, BLOCK_K)
        o_v = i_tile * BLOCK_V + tl.arange(0, BLOCK_V)
        m_k, m_v = o_k < KEY, o_v < VALUE
        o_state = (i_head * KEY + o_k[:, None]) * VALUE + o_v[None, :]
        m_state = m_k[:, None] & m_v[None, :]
        read = tl.load(reads_ptr + i_row).to(tl.int64)
        b_state = tl.load(state_ptr + read * state_stride + o_state, mask=m_state, other=0.0)
        p_saves = saves_ptr + i_row * (2 * NUM_SAVES)
        if NUM_SAVES:
            o_m = tl.arange(0, BLOCK_M)
            b_saved = tl.load(p_saves + 2 * o_m, mask=o_m < NUM_SAVES, other=0)
            b_to = tl.load(p_saves + 2 * o_m + 1, mask=o_m < NUM_SAVES, other=-1)
            b_saved = tl.where(b_to >= 0, b_saved, 0)
        for i in range((length + SIZE - 1) // SIZE - grid):
            position = tl.maximum(start, (grid + i) * SIZE)
            end = tl.minimum(length, (grid + i) * SIZE + SIZE)
            m_t = o_t < end - position
            first = (begin + (position - start)).to(tl.int64)
            p_before = before_ptr + (i_first + i) * (HEADS * KEY * VALUE) + o_state
            b_rounded = b_state.to(before_ptr.dtype.element_ty)
            tl.store(p_before, b_rounded, mask=m_state)
            p_w = w_ptr + (first * HEADS + i_head) * KEY
            p_w += o_t[:, None] * (HEADS * KEY) + o_k[None, :]
            b_w = tl.load(p_w, mask=m_t[:, None] & m_k[None, :], other=0.0)
            p_u = u_ptr + (first * HEADS + i_head) * VALUE
            p_u += o_t[:, None] * (HEADS * VALUE) + o_v[None, :]
            m_u = m_t[:, None] & m_v[None, :]
            b_u = tl.load(p_u, mask=m_u, other=0.0).to(tl.float32)
            b_u -= tl.dot(b_w, b_rounded, input_precision="ieee")
            tl.store(p_u, b_u.to(u_ptr.dtype.element_ty), mask=m_u)
            p_g = decays_ptr + first * HEADS + i_head
            b_g = tl.load(p_g + o_t * HEADS, mask=m_t, other=0.0)
            i_key = KEY_HEADS + i_head // (HEADS // KEY_HEADS)
            p_k = mixed_ptr + first * CHANNELS + i_key * KEY
            p_k += o_t[None, :] * CHANNELS + o_k[:, None]
            b_k = tl.load(p_k, mask=m_t[None, :] & m_k[:, None], other=0.0)  # [BLOCK_K, SIZE]
            if NUM_SAVES:  # noqa: SIM102 (a constant: without saves there is no branch)
                if tl.max(((b_saved > position) & (b_saved <= end)).to(tl.int32), 0) > 0:
                    for m in range(NUM_SAVES):
                        saved = tl.load(p_saves + 2 * m)
                        block = tl.load(p_saves + 2 * m + 1).to(tl.int64)
                        if (block >= 0) & (saved > position) & (saved <= end):
                            n = saved - position
                            b_saving = _behind(b_state, b_k, b_u, b_g, p_g, o_t, n, HEADS)
                            p_save = state_ptr + block * state_stride + o_state
                            tl.store(p_save, b_saving, mask=m_state)
            n = end - position
            b_state = _behind(b_state, b_k, b_u, b_g, p_g, o_t, n, HEADS)
        tl.store(state_ptr + write.to(tl.int64) * state_stride + o_state, b_state, mask=m_state)


@triton.jit
def _behind(b_state, b_k, b_u, b_g, p_g, o_t, num_tokens, HEADS: tl.constexpr):
    """Return the state behind the first tokens of a sub-chunk."""
    g = tl.load(p_g + (num_tokens - 1) * HEADS)
    b_factor = tl.where(o_t < num_tokens, tl.exp(tl.minimum(g - b_g, 0.0)), 0.0)
    b_u = (b_u * b_factor[:, None]).to(b_k.dtype)
    return tl.dot(b_k, b_u, b_state * tl.exp(g), input_precision="ieee")


@triton.jit
def _outputs_kernel(
    mixed_ptr,
    decays_ptr,
    u_ptr,
    before_ptr,
    z_ptr,
    norm_ptr,
    out_ptr,
    items_ptr,
    z_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    GATE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    i_head, i_item = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p_item = items_ptr + i_item * 5
    if tl.load(p_item) >= 0:
        first = tl.load(p_item + 1).to(tl.int64)
        num_tokens = (tl.load(p_item + 2) - first).to(tl.int32)
        o_t = tl.arange(0, SIZE)
        o_k, o_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        m_t, m_v = o_t < num_tokens, o_v < VALUE
        i_key = i_head // (HEADS // KEY_HEADS)
        p_q = mixed_ptr + first * CHANNELS + i_key * KEY
        p_q += o_t[:, None] * CHANNELS + o_k[None, :]
        p_before = before_ptr + (i_item * HEADS + i_head) * (KEY * VALUE)
        p_before += o_k[:, None] * VALUE + o_v[None, :]
        b_out = tl.zeros([SIZE, BLOCK_V], tl.float32)
        b_a = tl.zeros([SIZE, SIZE], tl.float32)
        for i in range(0, KEY, BLOCK_K):
            m_k = i + o_k < KEY
            m_q = m_t[:, None] & m_k[None, :]
            b_q = tl.load(p_q + i, mask=m_q, other=0.0)
            b_k = tl.load(p_q + (i + KEY_HEADS * KEY), mask=m_q, other=0.0)
            m_before = m_k[:, None] & m_v[None, :]
            b_before = tl.load(p_before + i * VALUE, mask=m_before, other=0.0)
            b_out = tl.dot(b_q, b_before, b_out, input_precision="ieee")
            b_a = tl.dot(b_q, tl.trans(b_k), b_a, input_precision="ieee")
        b_g = tl.load(decays_ptr + first * HEADS + i_head + o_t * HEADS, mask=m_t, other=0.0)
        b_out *= tl.exp(b_g)[:, None]
        b_a *= tl.exp(tl.minimum(b_g[:, None] - b_g[None, :], 0.0))
        b_a = tl.where(o_t[:, None] >= o_t[None, :], b_a, 0.0)
        head = (first * HEADS + i_head) * VALUE
        o_out = o_t[:, None] * (HEADS * VALUE) + o_v[None, :]
        m_out = m_t[:, None] & m_v[None, :]
        b_u = tl.load(u_ptr + head + o_out, mask=m_out, other=0.0)
        b_out = tl.dot(b_a.to(b_u.dtype), b_u, b_out, input_precision="ieee")
        b_out *= tl.rsqrt(tl.sum(b_out * b_out, 1) / VALUE + eps)[:, None]
        b_out *= tl.load(norm_ptr + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
        p_z = z_ptr + first * z_stride + i_head * VALUE + (o_t[:, None] * z_stride + o_v[None, :])
        b_out *= gate(tl.load(p_z, mask=m_out, other=0.0).to(tl.float32), GATE)
        tl.store(out_ptr + head + o_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)


def settings(key_dim: int, value_dim: int) -> dict[str, dict[str, int]]:
    """Return tile sizes, warps and stages of each kernel.

    `_convolve_kernel` has 16 values per thread, so that half of an SM's threads have room.
    `_local_kernel` has a warp for each group of 16 tokens. Of `_states_kernel` a single row has 4
    programs per head of 128 values, which 32 heads spread over all SMs of an H200.
    """
    block_k, block_v = (max(next_power_of_2(size), 16) for size in (key_dim, value_dim))
    block = max(block_k, block_v)
    return {
        "convolve": {"BLOCK": block, "TOKENS": 16, "num_warps": max(block // 32, 1)},
        "local": {"BLOCK_K": block_k, "BLOCK_V": block_v, "num_warps": 4},
        "states": {
            "BLOCK_K": block_k,
            "BLOCK_V": min(block_v, _VALUES),
            "num_warps": 8,
            "num_stages": 2,
        },
        "outputs": {
            "BLOCK_K": min(block_k, 64),
            "BLOCK_V": block_v,
            "num_warps": 8,
            "num_stages": 2,
        },
    }


def launch(
    arguments: dict[str, Any],
    cache: StateCache,
    step: StepStates,
    sub_chunks: SubChunks,
    out: Tensor,
) -> None:
    """Compute the rows of several tokens; their rings are left to be written.

    Args:
        arguments: arguments of the kernels of tokens and weights, by name.
        cache: the states.
        step: at least one row.
        sub_chunks: of the step, at least one.
        out: [T, H * V], contiguous, in the dtype of the model.
    """
    assert cache.state is not None
    _, heads, key_dim, value_dim = cache.state.shape
    channels = cache.ring.shape[2]
    tokens, items, where = len(out), sub_chunks.items, out.device
    mixed = torch.empty(tokens, channels, dtype=out.dtype, device=where)
    decays = torch.empty(tokens, heads, dtype=torch.float32, device=where)
    w = torch.empty(tokens, heads * key_dim, dtype=out.dtype, device=where)
    u = torch.empty_like(out)
    before = torch.empty(len(items), heads, key_dim, value_dim, dtype=out.dtype, device=where)
    tiles = settings(key_dim, value_dim)
    head = {name: arguments[name] for name in ("KEY_HEADS", "HEADS", "KEY", "VALUE")}

    def some(*names: str) -> dict[str, Any]:
        return head | {name: arguments[name] for name in names}

    slabs = SIZE // tiles["convolve"]["TOKENS"]
    _convolve_kernel[(2 * head["KEY_HEADS"] + heads, slabs * len(items))](
        **some("x_ptr", "conv_ptr", "x_stride", "channel_stride", "tap_stride", "KERNEL"),
        ring_ptr=cache.ring,
        mixed_ptr=mixed,
        items_ptr=items,
        reads_ptr=step.reads,
        ring_stride=cache.ring.stride(0),
        RING=cache.ring.shape[1],
        L2_EPS=L2_EPS,
        SIZE=SIZE,
        **tiles["convolve"],
    )
    _local_kernel[(heads, len(items))](
        **some("beta_ptr", "inputs_ptr", "decay_ptr", "bias_ptr", "beta_stride", "inputs_stride"),
        mixed_ptr=mixed,
        decays_ptr=decays,
        w_ptr=w,
        u_ptr=u,
        items_ptr=items,
        **tiles["local"],
    )
    values = tiles["states"]["BLOCK_V"]
    _states_kernel[(cdiv(value_dim, values), heads, len(step.seq_lens))](
        **head,
        mixed_ptr=mixed,
        decays_ptr=decays,
        w_ptr=w,
        u_ptr=u,
        before_ptr=before,
        state_ptr=cache.state,
        firsts_ptr=sub_chunks.firsts,
        starts_ptr=step.query_start_loc,
        seq_lens_ptr=step.seq_lens,
        reads_ptr=step.reads,
        writes_ptr=step.writes,
        saves_ptr=step.saves,
        state_stride=cache.state.stride(0),
        NUM_SAVES=step.saves.shape[1],
        SIZE=SIZE,
        BLOCK_M=next_power_of_2(step.saves.shape[1]),
        **tiles["states"],
    )
    _outputs_kernel[(heads, len(items))](
        **some("z_ptr", "norm_ptr", "z_stride", "eps", "GATE"),
        mixed_ptr=mixed,
        decays_ptr=decays,
        u_ptr=u,
        before_ptr=before,
        out_ptr=out,
        items_ptr=items,
        SIZE=SIZE,
        **tiles["outputs"],
    )
