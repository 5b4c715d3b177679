"""The short convolution of LFM2 (Liquid AI, 2025): `C * conv(B * x)`, gated before and behind.

Of three projections of a token, B, C and x, the product of B and x goes through a causal
convolution of each channel over the last few tokens, whose result C multiplies.

On a GPU one program computes channels of a row of one token, and writes its rings; of longer rows
channels of a sub-chunk. Their rings are written by a launch behind it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import cpu, dependent_launch, device
from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_dtype,
    check_last_stride,
    check_like,
    check_shape,
)
from kernels.dependent_launch import start_next, wait
from kernels.device import cdiv, next_power_of_2
from kernels.state.rings import (
    STEP_ARRAYS,
    convolve,
    store_rings,
    store_zeros,
    write_rings,
)
from kernels.state.states import (
    StateCache,
    StepStates,
    check_states,
    convolve_tokens,
    step_rows,
    store_row_rings,
    with_history,
)
from kernels.state.sub_chunks import SIZE


def short_conv(
    projected: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, step: StepStates
) -> Tensor:
    """Return the gated convolutions of a step's tokens; read and write their rings in `cache`.

    A token's result and the rings depend, to the last bit, on its sequence alone: not on how that
    is cut into steps, nor on the other rows.

    Args:
        projected: float [T, 3 * C]: B, C and x of each token side by side. Tokens may be strided.
        weight: [C, kernel size], of the dtype of `projected`: the taps of each channel, the last
            of them for the token itself. On a CPU the transpose of a contiguous tensor saves a
            copy.
        bias: [C] of the same dtype, added to the convolution, or None.
        cache: ring [N, R, C], which holds B * x; its state is not used.
        step: rows of the step, and the blocks of their states.

    Returns:
        [T, C] in the dtype of `projected`, contiguous: B * x is rounded, convolved in float32,
        rounded, and multiplied by C. Zeros for padding and for the tokens of idle rows.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(projected, weight, bias, cache, step)
    if device.runs_triton(projected):
        return _launch(projected, weight, bias, cache, step)
    if (fast := cpu.operations(projected)) is not None:
        out: Tensor = fast.short_conv(
            projected,
            weight.t().contiguous(),
            bias,
            cache.ring,
            step.query_start_loc,
            step.seq_lens,
            step.reads,
            step.writes,
            step.saves,
        )
        return out
    return reference(projected, weight, bias, cache, step).to(projected.dtype)


def reference(
    projected: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, step: StepStates
) -> Tensor:
    """Return the results in float32, not rounded at last; write the rings as `short_conv` does."""
    inner, gate, x = projected.chunk(3, dim=-1)
    out = torch.zeros(gate.shape, dtype=torch.float32, device=gate.device)
    for row in step_rows(step):
        tokens = slice(row.begin, row.end)
        inputs = with_history(cache.ring, row, inner[tokens] * x[tokens])
        mixed = convolve_tokens(inputs, weight, bias, row.end - row.begin).to(projected.dtype)
        out[tokens] = gate[tokens].float() * mixed.float()
        store_row_rings(cache.ring, row, inputs)
    return out


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=STEP_ARRAYS
)
def _token_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ring_ptr,
    out_ptr,
    starts_ptr,
    seq_lens_ptr,
    reads_ptr,
    writes_ptr,
    saves_ptr,
    x_stride,
    channel_stride,
    tap_stride,
    ring_stride,
    num_rows,
    num_tokens,
    HAS_BIAS: tl.constexpr,
    KERNEL: tl.constexpr,
    CHANNELS: tl.constexpr,
    NUM_SAVES: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_row = tl.program_id(1)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < CHANNELS
    wait(DEPENDENT)
    begin = tl.load(starts_ptr + i_row)
    end = tl.load(starts_ptr + i_row + 1)
    length = tl.load(seq_lens_ptr + i_row)
    read = tl.load(reads_ptr + i_row)
    write = tl.load(writes_ptr + i_row)
    if i_row == num_rows - 1:
        store_zeros(out_ptr, CHANNELS, end, num_tokens, o, m, 8)
    if (length == 0) | (write < 0):
        store_zeros(out_ptr, CHANNELS, begin, end, o, m, 8)
    elif end - begin == 1:
        start = length - 1
        p_ring = ring_ptr + read.to(tl.int64) * ring_stride
        b_sum = convolve(
            x_ptr,
            p_ring,
            weight_ptr,
            x_stride,
            channel_stride,
            tap_stride,
            start + 0 * o,
            o,
            m,
            m,
            begin,
            start,
            KERNEL,
            RING,
            CHANNELS,
            True,
        )
        p_gate = x_ptr + begin.to(tl.int64) * x_stride + CHANNELS + o
        b_out = _gated(b_sum, bias_ptr, p_gate, o, m, m, HAS_BIAS)
        start_next(DEPENDENT)
        tl.store(out_ptr + begin.to(tl.int64) * CHANNELS + o, b_out, mask=m)
        store_rings(
            x_ptr,
            ring_ptr,
            saves_ptr + i_row * (2 * NUM_SAVES),
            x_stride,
            ring_stride,
            o,
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
            True,
        )


@triton.jit
def _sub_chunk_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ring_ptr,
    out_ptr,
    items_ptr,
    reads_ptr,
    x_stride,
    channel_stride,
    tap_stride,
    ring_stride,
    HAS_BIAS: tl.constexpr,
    KERNEL: tl.constexpr,
    CHANNELS: tl.constexpr,
    RING: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    SLABS: tl.constexpr = SIZE // TOKENS
    p_item = items_ptr + tl.program_id(1) // SLABS * 5
    skipped = tl.program_id(1) % SLABS * TOKENS  # of the sub-chunk
    i_row = tl.load(p_item)
    first = tl.load(p_item + 1) + skipped
    num_tokens = tl.load(p_item + 2) - first
    if (i_row >= 0) & (num_tokens > 0):
        position = tl.load(p_item + 3) + skipped
        start = tl.load(p_item + 4)
        o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
        o_token = tl.arange(0, TOKENS)[:, None]
        m_channel = o < CHANNELS
        m = (o_token < num_tokens) & m_channel
        b_sum = convolve(
            x_ptr,
            ring_ptr + tl.load(reads_ptr + i_row).to(tl.int64) * ring_stride,
            weight_ptr,
            x_stride,
            channel_stride,
            tap_stride,
            position + o_token,
            o,
            m,
            m_channel,
            first - (position - start),
            start,
            KERNEL,
            RING,
            CHANNELS,
            True,
        )
        o_token = (first + o_token).to(tl.int64)
        p_gate = x_ptr + o_token * x_stride + CHANNELS + o
        b_out = _gated(b_sum, bias_ptr, p_gate, o, m, m_channel, HAS_BIAS)
        tl.store(out_ptr + o_token * CHANNELS + o, b_out, mask=m)


@triton.jit
def _gated(b_sum, bias_ptr, p_gate, o, m, m_channel, HAS_BIAS: tl.constexpr):
    """Return the convolution, rounded, times the gates."""
    if HAS_BIAS:
        b_sum += tl.load(bias_ptr + o, mask=m_channel, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate, mask=m, other=0.0)
    return (b_gate.to(tl.float32) * b_sum.to(b_gate.dtype).to(tl.float32)).to(b_gate.dtype)


def token_settings(channels: int) -> dict[str, int]:
    """Return channels of a program and warps for rows of one token: a program of each 512 channels,
    of 4 values per thread, so that a single row has several."""
    block = min(next_power_of_2(channels), 512)
    return {"BLOCK": block, "num_warps": max(block // 128, 1)}


def sub_chunk_settings(channels: int) -> dict[str, int]:
    """Return channels of a program and warps for sub-chunks: 16 values per thread."""
    block = min(next_power_of_2(channels), 128)
    return {"BLOCK": block, "TOKENS": 16, "num_warps": max(block // 32, 1)}


def _launch(
    projected: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, step: StepStates
) -> Tensor:
    num_rows, num_tokens = len(step.seq_lens), len(projected)
    channels, kernel_size = weight.shape
    shape, where = (num_tokens, channels), projected.device
    if not num_rows or not num_tokens:
        return torch.zeros(shape, dtype=projected.dtype, device=where)
    out = torch.empty(shape, dtype=projected.dtype, device=where)
    ring_size = cache.ring.shape[1]
    shared = {
        "x_ptr": projected,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "ring_ptr": cache.ring,
        "out_ptr": out,
        "reads_ptr": step.reads,
        "x_stride": projected.stride(0),
        "channel_stride": weight.stride(0),
        "tap_stride": weight.stride(1),
        "ring_stride": cache.ring.stride(0),
        "HAS_BIAS": bias is not None,
        "KERNEL": kernel_size,
        "CHANNELS": channels,
        "RING": ring_size,
    }
    tile = token_settings(channels)
    _token_kernel[(cdiv(channels, tile["BLOCK"]), num_rows)](
        **shared,
        starts_ptr=step.query_start_loc,
        seq_lens_ptr=step.seq_lens,
        writes_ptr=step.writes,
        saves_ptr=step.saves,
        num_rows=num_rows,
        num_tokens=num_tokens,
        NUM_SAVES=step.saves.shape[1],
        BLOCK_R=next_power_of_2(ring_size),
        **tile,
        **dependent_launch.options(where),
    )
    items = step.sub_chunks_of(num_tokens).items
    if len(items):
        tile = sub_chunk_settings(channels)
        slabs = SIZE // tile["TOKENS"]
        _sub_chunk_kernel[(cdiv(channels, tile["BLOCK"]), slabs * len(items))](
            **shared, items_ptr=items, SIZE=SIZE, **tile
        )
        write_rings(projected, cache, step, gated=True)
    return out


def _check(
    projected: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, step: StepStates
) -> None:
    check_dtype("projected", projected, *FLOATS)
    check_shape("weight", weight, (None, None))
    channels, kernel_size = weight.shape
    if not channels or not kernel_size:
        raise ValueError(f"weight: must not be empty (got shape {list(weight.shape)})")
    check_shape("projected", projected, (None, 3 * channels))
    check_last_stride("projected", projected)
    check_like("weight", weight, projected)
    if bias is not None:
        check_shape("bias", bias, (channels,))
        check_like("bias", bias, projected)
        check_contiguous("bias", bias)
    check_states(cache, step, projected, channels, kernel_size)
