"""What kernels of state layers share: inputs of the convolution, new and from rings; ring writes.

An input is a row of a projection or, `GATED`, the rounded product of its first and third part. A
ring is written slot by slot: the slot of a position gets the last position before the ring's end
that has it. Slots that keep what they have are not written, so that a row of one token may be
written in the launch that reads it: it writes the one slot that no tap reads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.device import cdiv, next_power_of_2
from kernels.state.states import StateCache, StepStates

# Pointers to arrays of a step, which are views of larger arrays: alignment must not recompile.
STEP_ARRAYS = ["starts_ptr", "seq_lens_ptr", "reads_ptr", "writes_ptr", "saves_ptr"]


@triton.jit
def load_inputs(
    x_ptr,
    ring_ptr,
    x_stride,
    o_position,
    o_channel,
    m,
    begin,
    start,
    RING: tl.constexpr,
    CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Return the inputs of positions, where `m`: the row's from `start` on, its `begin`-th token of
    the step; those before from the ring; zeros before the sequence."""
    m_new = o_position >= start
    o_token = (begin + (o_position - start)).to(tl.int64)
    p_x = x_ptr + o_token * x_stride + o_channel
    b_x = tl.load(p_x, mask=m & m_new, other=0.0)
    if GATED:
        b_factor = tl.load(p_x + 2 * CHANNELS, mask=m & m_new, other=0.0)
        b_x = (b_x.to(tl.float32) * b_factor.to(tl.float32)).to(ring_ptr.dtype.element_ty)
    p_old = ring_ptr + (o_position + RING) % RING * CHANNELS + o_channel
    b_old = tl.load(p_old, mask=m & (o_position < start) & (o_position >= 0), other=0.0)
    return tl.where(m_new, b_x, b_old)


@triton.jit
def convolve(
    x_ptr,
    ring_ptr,
    conv_ptr,
    x_stride,
    channel_stride,
    tap_stride,
    o_position,
    o_channel,
    m,
    m_channel,
    begin,
    start,
    KERNEL: tl.constexpr,
    RING: tl.constexpr,
    CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Return the convolution at positions in float32; the taps are added in their order."""
    p_tap = conv_ptr + o_channel * channel_stride
    for tap in tl.static_range(KERNEL):
        b_x = load_inputs(
            x_ptr,
            ring_ptr,
            x_stride,
            o_position - (KERNEL - 1 - tap),
            o_channel,
            m,
            begin,
            start,
            RING,
            CHANNELS,
            GATED,
        ).to(tl.float32)
        b_tap = tl.load(p_tap + tap * tap_stride, mask=m_channel, other=0.0).to(tl.float32)
        if tap == 0:
            b_sum = b_x * b_tap
        else:
            b_sum += b_x * b_tap
    return b_sum


@triton.jit
def store_rings(
    x_ptr,
    ring_ptr,
    saves_ptr,
    x_stride,
    ring_stride,
    o_channel,
    m_channel,
    begin,
    start,
    length,
    read,
    write,
    NUM_SAVES: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Write the rings of a row's saves, `saves_ptr` on, and of its end for channels [BLOCK]."""
    for i in range(NUM_SAVES):
        position = tl.load(saves_ptr + 2 * i)
        block = tl.load(saves_ptr + 2 * i + 1)
        if (block >= 0) & (position > start) & (position <= length):
            _store_ring(
                x_ptr, ring_ptr, x_stride, ring_stride, o_channel, m_channel, begin, start,
                position, read, block, RING, BLOCK_R, CHANNELS, GATED,
            )  # fmt: skip
    # Behind the saves: what it overwrites has been read by then.
    _store_ring(
        x_ptr, ring_ptr, x_stride, ring_stride, o_channel, m_channel, begin, start,
        length, read, write, RING, BLOCK_R, CHANNELS, GATED,
    )  # fmt: skip


@triton.jit
def _store_ring(
    x_ptr,
    ring_ptr,
    x_stride,
    ring_stride,
    o_channel,
    m_channel,
    begin,
    start,
    position,
    read,
    block,
    RING: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Write the ring of the row's tokens before a position to a block."""
    o_slot = tl.arange(0, BLOCK_R)[:, None]
    o_position = position - 1 - (position - 1 - o_slot + RING) % RING
    first = tl.where(block == read, start, -RING)  # position that the block lacks
    m = (o_slot < RING) & m_channel[None, :] & (o_position >= first)
    b_x = load_inputs(
        x_ptr,
        ring_ptr + read.to(tl.int64) * ring_stride,
        x_stride,
        o_position,
        o_channel[None, :],
        m,
        begin,
        start,
        RING,
        CHANNELS,
        GATED,
    )
    p_ring = ring_ptr + block.to(tl.int64) * ring_stride + o_slot * CHANNELS
    tl.store(p_ring + o_channel[None, :], b_x, mask=m)


@triton.jit
def store_zeros(out_ptr, out_stride, first, end, o_channel, m_channel, TOKENS: tl.constexpr):
    """Write zeros to the channels of the tokens from `first` to `end`."""
    o_token = tl.arange(0, TOKENS)[:, None]
    b_zeros = tl.zeros([TOKENS, o_channel.shape[0]], out_ptr.dtype.element_ty)
    for i in range(first, end, TOKENS):
        p_out = out_ptr + (i + o_token).to(tl.int64) * out_stride + o_channel[None, :]
        tl.store(p_out, b_zeros, mask=(i + o_token < end) & m_channel[None, :])


@triton.jit(do_not_specialize_on_alignment=STEP_ARRAYS)
def _rings_kernel(
    x_ptr,
    ring_ptr,
    starts_ptr,
    seq_lens_ptr,
    reads_ptr,
    writes_ptr,
    saves_ptr,
    x_stride,
    ring_stride,
    NUM_SAVES: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(1)
    begin = tl.load(starts_ptr + i_row)
    tokens = tl.load(starts_ptr + i_row + 1) - begin
    length = tl.load(seq_lens_ptr + i_row)
    write = tl.load(writes_ptr + i_row)
    if (length > 0) & (write >= 0) & (tokens > 1):
        o_channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        store_rings(
            x_ptr,
            ring_ptr,
            saves_ptr + i_row * (2 * NUM_SAVES),
            x_stride,
            ring_stride,
            o_channel,
            o_channel < CHANNELS,
            begin,
            length - tokens,
            length,
            tl.load(reads_ptr + i_row),
            write,
            NUM_SAVES,
            RING,
            BLOCK_R,
            CHANNELS,
            GATED,
        )


def write_rings(x: Tensor, cache: StateCache, step: StepStates, *, gated: bool) -> None:
    """Write the rings of rows of several tokens, of their saves too, behind all that read them.

    Args:
        x: [T, C], or [T, 3 * C] if gated; tokens may be strided.
        cache: ring [N, R, C].
        step: rows of the step.
        gated: whether an input is the product of the first and the third part of a token.
    """
    _, ring_size, channels = cache.ring.shape
    tile = settings(ring_size, channels)
    _rings_kernel[(cdiv(channels, tile["BLOCK"]), len(step.seq_lens))](
        x_ptr=x,
        ring_ptr=cache.ring,
        starts_ptr=step.query_start_loc,
        seq_lens_ptr=step.seq_lens,
        reads_ptr=step.reads,
        writes_ptr=step.writes,
        saves_ptr=step.saves,
        x_stride=x.stride(0),
        ring_stride=cache.ring.stride(0),
        NUM_SAVES=step.saves.shape[1],
        RING=ring_size,
        BLOCK_R=next_power_of_2(ring_size),
        CHANNELS=channels,
        GATED=gated,
        **tile,
    )


def settings(ring_size: int, channels: int) -> dict[str, int]:
    """Return channels of a program and warps: 8 values per thread up to rings of 16 slots."""
    block = min(next_power_of_2(channels), 1024)
    slots = min(next_power_of_2(ring_size), 16)
    return {"BLOCK": block, "num_warps": min(max(block * slots // 256, 1), 16)}
