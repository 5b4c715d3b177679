"""The gated delta rule token by token on a GPU: rows of one token, or all rows.

One program computes a head of values of a row: convolution, SiLU, norms of query and key, gates,
rule and gated norm in one launch. The head's state stays in registers, read and written once,
however many tokens the row has. So a token's result and the states depend, to the last bit, on its
sequence alone, if all rows are computed here.

With the state before the token, S, both products that read it are sums at a time: its results for
the key and for the query, S^T k and S^T q, since the new state's result for the query is
exp(g) S^T q + (k^T q) (beta (v - exp(g) S^T k)).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels import dependent_launch
from kernels.dependent_launch import start_next, wait
from kernels.device import next_power_of_2
from kernels.gated_activation import gate_of
from kernels.state.rings import STEP_ARRAYS, load_inputs, store_rings, store_zeros
from kernels.state.states import StateCache, StepStates

L2_EPS = 1e-6  # added to the squares of a query and of a key, as by the models


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens"],
    do_not_specialize_on_alignment=STEP_ARRAYS,
)
def _kernel(
    x_ptr,
    z_ptr,
    beta_ptr,
    inputs_ptr,
    conv_ptr,
    decay_ptr,
    bias_ptr,
    norm_ptr,
    ring_ptr,
    state_ptr,
    out_ptr,
    starts_ptr,
    seq_lens_ptr,
    reads_ptr,
    writes_ptr,
    saves_ptr,
    x_stride,
    z_stride,
    beta_stride,
    inputs_stride,
    channel_stride,
    tap_stride,
    ring_stride,
    state_stride,
    num_rows,
    num_tokens,
    eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KERNEL: tl.constexpr,
    RING: tl.constexpr,
    NUM_SAVES: tl.constexpr,
    GATE: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    L2_EPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    RATIO: tl.constexpr = HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    i_head, i_row = tl.program_id(0), tl.program_id(1)
    o_k, o_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < KEY, o_v < VALUE
    o_query = i_head // RATIO * KEY + o_k
    o_key = KEY_HEADS * KEY + o_query
    o_value = 2 * KEY_HEADS * KEY + i_head * VALUE + o_v
    o_out = i_head * VALUE + o_v
    decay = tl.load(decay_ptr + i_head)
    bias = tl.load(bias_ptr + i_head).to(tl.float32)
    b_norm = tl.load(norm_ptr + o_v, mask=m_v, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    begin = tl.load(starts_ptr + i_row)
    end = tl.load(starts_ptr + i_row + 1)
    length = tl.load(seq_lens_ptr + i_row)
    read = tl.load(reads_ptr + i_row)
    write = tl.load(writes_ptr + i_row)
    if i_row == num_rows - 1:
        store_zeros(out_ptr, HEADS * VALUE, end, num_tokens, o_out, m_v, 8)
    if (length == 0) | (write < 0):
        store_zeros(out_ptr, HEADS * VALUE, begin, end, o_out, m_v, 8)
    elif (end - begin == 1) | (ALL_ROWS & (end > begin)):
        start = length - (end - begin)
        p_ring = ring_ptr + read.to(tl.int64) * ring_stride
        p_saves = saves_ptr + i_row * (2 * NUM_SAVES)
        p_state = state_ptr + i_head * (KEY * VALUE)
        o_state = tl.arange(0, BLOCK_K // 4)[:, None] * (4 * VALUE) + o_v[None, :]
        p_read = p_state + read.to(tl.int64) * state_stride
        # Part j has the rows of keys 4 i + j: [BLOCK_K / 4, BLOCK_V].
        b_s0 = _load_part(p_read, o_state, 0, m_v, KEY, VALUE, BLOCK_K)
        b_s1 = _load_part(p_read, o_state, 1, m_v, KEY, VALUE, BLOCK_K)
        b_s2 = _load_part(p_read, o_state, 2, m_v, KEY, VALUE, BLOCK_K)
        b_s3 = _load_part(p_read, o_state, 3, m_v, KEY, VALUE, BLOCK_K)
        # Without a loop the other rows take half of the registers.
        for i in range(end - begin if ALL_ROWS else 1):
            position = start + i
            i_token = begin.to(tl.int64) + i
            b_q = _convolved(
                x_ptr, p_ring, conv_ptr, x_stride, channel_stride, tap_stride, position, o_query,
                m_k, begin, start, KERNEL, RING, CHANNELS, BLOCK_T,
            )  # fmt: skip
            b_k = _convolved(
                x_ptr, p_ring, conv_ptr, x_stride, channel_stride, tap_stride, position, o_key,
                m_k, begin, start, KERNEL, RING, CHANNELS, BLOCK_T,
            )  # fmt: skip
            b_v = _convolved(
                x_ptr, p_ring, conv_ptr, x_stride, channel_stride, tap_stride, position, o_value,
                m_v, begin, start, KERNEL, RING, CHANNELS, BLOCK_T,
            )  # fmt: skip
            b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + L2_EPS) * (KEY**-0.5)
            b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + L2_EPS)
            step_size = tl.load(inputs_ptr + i_token * inputs_stride + i_head).to(tl.float32) + bias
            kept = tl.exp(decay * softplus(step_size))
            beta = sigmoid(tl.load(beta_ptr + i_token * beta_stride + i_head).to(tl.float32))
            b_k0, b_k1, b_k2, b_k3 = _parts(b_k, BLOCK_K)
            b_q0, b_q1, b_q2, b_q3 = _parts(b_q, BLOCK_K)
            # Added up elementwise before they are summed: a sum holds all of its products.
            b_known = b_s0 * b_k0 + b_s1 * b_k1 + b_s2 * b_k2 + b_s3 * b_k3
            b_known = tl.sum(b_known, 0) * kept  # [BLOCK_V]
            b_out = b_s0 * b_q0 + b_s1 * b_q1 + b_s2 * b_q2 + b_s3 * b_q3
            b_out = tl.sum(b_out, 0) * kept
            b_new = beta * (b_v - b_known)
            b_out += tl.sum(b_k * b_q, 0) * b_new
            b_s0 = b_s0 * kept + b_k0 * b_new[None, :]
            b_s1 = b_s1 * kept + b_k1 * b_new[None, :]
            b_s2 = b_s2 * kept + b_k2 * b_new[None, :]
            b_s3 = b_s3 * kept + b_k3 * b_new[None, :]
            b_z = tl.load(z_ptr + i_token * z_stride + o_out, mask=m_v, other=0.0).to(tl.float32)
            b_out *= tl.rsqrt(tl.sum(b_out * b_out, 0) / VALUE + eps) * b_norm * gate(b_z, GATE)
            p_out = out_ptr + i_token * (HEADS * VALUE) + o_out
            tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_v)
            for j in range(NUM_SAVES):
                block = tl.load(p_saves + 2 * j + 1)
                if (tl.load(p_saves + 2 * j) == position + 1) & (block >= 0):
                    p_save = p_state + block.to(tl.int64) * state_stride
                    _store_part(p_save, o_state, 0, m_v, b_s0, KEY, VALUE, BLOCK_K)
                    _store_part(p_save, o_state, 1, m_v, b_s1, KEY, VALUE, BLOCK_K)
                    _store_part(p_save, o_state, 2, m_v, b_s2, KEY, VALUE, BLOCK_K)
                    _store_part(p_save, o_state, 3, m_v, b_s3, KEY, VALUE, BLOCK_K)
        start_next(DEPENDENT)
        p_write = p_state + write.to(tl.int64) * state_stride
        _store_part(p_write, o_state, 0, m_v, b_s0, KEY, VALUE, BLOCK_K)
        _store_part(p_write, o_state, 1, m_v, b_s1, KEY, VALUE, BLOCK_K)
        _store_part(p_write, o_state, 2, m_v, b_s2, KEY, VALUE, BLOCK_K)
        _store_part(p_write, o_state, 3, m_v, b_s3, KEY, VALUE, BLOCK_K)
        if end - begin == 1:  # longer rows' rings are written when all heads have read them
            _store_rings(
                x_ptr, ring_ptr, p_saves, x_stride, ring_stride, o_value, m_v, begin, start,
                length, read, write, NUM_SAVES, RING, BLOCK_R, CHANNELS,
            )  # fmt: skip
            if i_head % RATIO == 0:
                _store_rings(
                    x_ptr, ring_ptr, p_saves, x_stride, ring_stride, o_query, m_k, begin, start,
                    length, read, write, NUM_SAVES, RING, BLOCK_R, CHANNELS,
                )  # fmt: skip
                _store_rings(
                    x_ptr, ring_ptr, p_saves, x_stride, ring_stride, o_key, m_k, begin, start,
                    length, read, write, NUM_SAVES, RING, BLOCK_R, CHANNELS,
                )  # fmt: skip


@triton.jit
def _load_part(
    p_state, o_state, j, m_v, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_K: tl.constexpr
):
    m = (4 * tl.arange(0, BLOCK_K // 4)[:, None] + j < KEY) & m_v[None, :]
    return tl.load(p_state + j * VALUE + o_state, mask=m, other=0.0)


@triton.jit
def _store_part(
    p_state,
    o_state,
    j,
    m_v,
    b_part,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = (4 * tl.arange(0, BLOCK_K // 4)[:, None] + j < KEY) & m_v[None, :]
    tl.store(p_state + j * VALUE + o_state, b_part, mask=m)


@triton.jit
def _parts(b_x, BLOCK_K: tl.constexpr):
    """Return the elements 4 i + j of [BLOCK_K] for each j, as columns."""
    b_even, b_odd = tl.split(tl.reshape(b_x, [BLOCK_K // 4, 2, 2]))
    b_0, b_2 = tl.split(b_even)
    b_1, b_3 = tl.split(b_odd)
    return b_0[:, None], b_1[:, None], b_2[:, None], b_3[:, None]


@triton.jit
def _convolved(
    x_ptr,
    p_ring,
    conv_ptr,
    x_stride,
    channel_stride,
    tap_stride,
    position,
    o_channel,
    m,
    begin,
    start,
    KERNEL: tl.constexpr,
    RING: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Return a token's channels, convolved, behind SiLU.

    All taps are one tile: of a smaller one each thread would load all that it uses of the result.
    """
    o_tap = tl.arange(0, BLOCK_T)[:, None]
    o_channel, m = o_channel[None, :], m[None, :] & (o_tap < KERNEL)
    b_x = load_inputs(
        x_ptr,
        p_ring,
        x_stride,
        position - (KERNEL - 1) + o_tap,
        o_channel,
        m,
        begin,
        start,
        RING,
        CHANNELS,
        False,
    )
    p_tap = conv_ptr + o_channel * channel_stride + o_tap * tap_stride
    b_tap = tl.load(p_tap, mask=m, other=0.0)
    return gate_of(tl.sum(b_x.to(tl.float32) * b_tap.to(tl.float32), 0), "silu")


@triton.jit
def _store_rings(
    x_ptr,
    ring_ptr,
    p_saves,
    x_stride,
    ring_stride,
    o_channel,
    m,
    begin,
    start,
    length,
    read,
    write,
    NUM_SAVES: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    store_rings(
        x_ptr,
        ring_ptr,
        p_saves,
        x_stride,
        ring_stride,
        o_channel,
        m,
        begin,
        start,
        length,
        read,
        write,
        NUM_SAVES,
        RING,
        BLOCK_R,
        CHANNELS,
        False,
    )


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), as exact for small exp(x) as for others."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    # log(u) is that of a rounded sum; the quotient corrects it (Kahan's log1p).
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)), without overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def gate(b_z, GATE: tl.constexpr):
    """Return the activation of an output's gates."""
    if GATE == "silu":
        b_gate = gate_of(b_z, "silu")
    else:
        b_gate = sigmoid(b_z)
    return b_gate


def settings(key_dim: int, value_dim: int, *, all_rows: bool) -> dict[str, int | None]:
    """Return tile sizes and warps: 64 values of the state per thread.

    A state of 128 x 128 takes 8 warps of 128 registers, so that a second program reads 64 KiB
    while the first computes. Wider states take more warps, not several tiles: the norm needs all
    results of a head. A loop over tokens keeps what it needs of the addresses too.
    """
    block_k, block_v = max(next_power_of_2(key_dim), 4), next_power_of_2(value_dim)
    warps = min(max(block_k * block_v // 2048, 1), 32)
    return {
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "num_warps": warps,
        "num_stages": 1,
        "maxnreg": 128 if warps <= 16 and not all_rows else None,
    }


def launch(
    arguments: dict[str, Any], cache: StateCache, step: StepStates, out: Tensor, *, all_rows: bool
) -> None:
    """Compute rows of one token, or `all_rows`; write zeros for idle rows and for padding.

    Args:
        arguments: the kernel's arguments of tokens and weights, by name.
        cache: the states.
        step: at least one row.
        out: [T, H * V], contiguous.
        all_rows: of several tokens too, whose rings are left to be written.
    """
    assert cache.state is not None
    _, heads, key_dim, value_dim = cache.state.shape
    ring_size = cache.ring.shape[1]
    _kernel[(heads, len(step.seq_lens))](
        **arguments,
        ring_ptr=cache.ring,
        state_ptr=cache.state,
        out_ptr=out,
        starts_ptr=step.query_start_loc,
        seq_lens_ptr=step.seq_lens,
        reads_ptr=step.reads,
        writes_ptr=step.writes,
        saves_ptr=step.saves,
        ring_stride=cache.ring.stride(0),
        state_stride=cache.state.stride(0),
        num_rows=len(step.seq_lens),
        num_tokens=len(out),
        ALL_ROWS=all_rows,
        NUM_SAVES=step.saves.shape[1],
        RING=ring_size,
        BLOCK_R=next_power_of_2(ring_size),
        BLOCK_T=next_power_of_2(arguments["KERNEL"]),
        L2_EPS=L2_EPS,
        **settings(key_dim, value_dim, all_rows=all_rows),
        **dependent_launch.options(out.device),
    )
