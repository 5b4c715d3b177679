"""Sums over ranks, alone and fused with the residual addition and the RMS norm that follow.

Each rank copies what it has to its buffer (`peers.py`). In one shot every rank reads all buffers
and adds all of it. In two shots each rank adds a part and writes the sum to its buffer, where the
others read it: that takes a second meeting, and of n ranks 2 / n of the reads from others. Both add
in the order of the ranks in float32 and round once, so that all ranks have the same bits, whichever
way was taken.

A program sums every n-th block of 4 KiB, or normalises every n-th row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import dependent_launch, device
from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_like,
    check_shape,
)
from kernels.collectives.peers import HALF_BYTES, PROGRAMS, Peers, half, meet
from kernels.dependent_launch import start_next, wait
from kernels.device import cdiv, next_power_of_2
from kernels.rms_norm import normalize
from kernels.rms_norm import settings as norm_settings

# A program's half of the buffer has room for two shares of it: blocks and rows stay whole.
MOST_BYTES = PROGRAMS * HALF_BYTES // 2
MOST_ROW_BYTES = 16384  # that are normalised: the rows of 8 ranks fit the registers
_BLOCK_BYTES = 4096  # 16 for each of 256 threads
_REGISTERS = 65536  # of an SM


def rank_sum(x: Tensor, peers: Peers, *, is_two_shot: bool = False) -> Tensor:
    """Return the sum of all ranks' `x`, which the same call of each of them gives.

    Args:
        x: float [T, N], contiguous, of at most MOST_BYTES, at all ranks alike.
        is_two_shot: each rank adds a part of it; changes no bit.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride, size or device.
    """
    _check(x, peers)
    out = torch.empty_like(x)
    if not x.numel():
        return out
    block = _BLOCK_BYTES // x.element_size()
    _sum_kernel[(min(cdiv(x.numel(), block), PROGRAMS),)](
        x_ptr=x,
        out_ptr=out,
        num_rows=x.shape[0],
        size=x.shape[1],
        is_two_shot=int(is_two_shot),
        BLOCK=block,
        num_warps=8,
        **_exchange(peers, x.device, 8),
    )
    return out


def rank_sum_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: Peers, *, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm_add` of `rank_sum(x)` and `residual`, to the last bit.

    Args:
        x, residual: float [T, N], contiguous, of at most MOST_BYTES, at all ranks alike; a row has
            at most MOST_ROW_BYTES.
        weight: [N], contiguous, of the dtype of `x`; a parameter, which no kernel writes.
        eps, unit_offset: as in `rms_norm`.

    Returns:
        The norm, and `rank_sum(x) + residual`: two tensors [T, N] in the dtype of `x`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride, size or device.
    """
    _check(x, peers)
    size = x.shape[1]
    if (row := size * x.element_size()) > MOST_ROW_BYTES:
        raise ValueError(f"x: a row must have at most {MOST_ROW_BYTES} bytes (got {row})")
    check_shape("residual", residual, tuple(x.shape))
    check_shape("weight", weight, (size,))
    for name, tensor in (("residual", residual), ("weight", weight)):
        check_like(name, tensor, x)
        check_contiguous(name, tensor)
    out, total = torch.empty_like(x), torch.empty_like(x)
    if not x.numel():
        return out, total
    tile = norm_settings(size)
    _norm_kernel[(min(cdiv(x.shape[0], tile["ROWS"]), PROGRAMS),)](
        x_ptr=x,
        residual_ptr=residual,
        weight_ptr=weight,
        out_ptr=out,
        total_ptr=total,
        num_rows=x.shape[0],
        size=size,
        eps=eps,
        UNIT_OFFSET=unit_offset,
        enable_fp_fusion=False,  # as in `rms_norm`
        **tile,
        **_exchange(peers, x.device, tile["num_warps"]),
    )
    return out, total


def reference(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of `parts`, in their order in float32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


@triton.jit(do_not_specialize=["num_rows", "is_two_shot", "rank"])
def _sum_kernel(
    x_ptr,
    out_ptr,
    buffers_ptr,
    signals_ptr,
    counts_ptr,
    aborted_ptr,
    rank,
    num_rows,
    size,
    is_two_shot,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    i_first, step = tl.program_id(0), tl.num_programs(0)
    numel = num_rows * size
    num_blocks = tl.cdiv(numel, BLOCK)
    o = tl.arange(0, BLOCK)
    wait(DEPENDENT)
    count = tl.load(counts_ptr + i_first)
    p_half = half(buffers_ptr, rank, count, dtype)
    o_half = 0
    for i_block in range(i_first, num_blocks, step):
        m = o < numel - i_block * BLOCK
        b_x = tl.load(x_ptr + i_block * BLOCK + o, mask=m)
        tl.store(p_half + o_half + o, b_x, mask=m)
        o_half += BLOCK
    meet(signals_ptr, aborted_ptr, rank, count, RANKS, LANES)
    o_half = 0
    if is_two_shot != 0:
        p_half = half(buffers_ptr, rank, count + 1, dtype)
        i_owner = i_first % RANKS
        for i_block in range(i_first, num_blocks, step):
            if i_owner == rank:
                m = o < numel - i_block * BLOCK
                b_sum = _sum(buffers_ptr, count, o_half + o, m, dtype, RANKS)
                tl.store(p_half + o_half + o, b_sum, mask=m)
            i_owner = (i_owner + 1) % RANKS
            o_half += BLOCK
        count += 1
        meet(signals_ptr, aborted_ptr, rank, count, RANKS, LANES)
        start_next(DEPENDENT)
        i_owner = i_first % RANKS
        o_half = 0
        for i_block in range(i_first, num_blocks, step):
            m = o < numel - i_block * BLOCK
            b_sum = tl.load(half(buffers_ptr, i_owner, count, dtype) + o_half + o, mask=m)
            tl.store(out_ptr + i_block * BLOCK + o, b_sum, mask=m)
            i_owner = (i_owner + 1) % RANKS
            o_half += BLOCK
    else:
        start_next(DEPENDENT)
        for i_block in range(i_first, num_blocks, step):
            m = o < numel - i_block * BLOCK
            b_sum = _sum(buffers_ptr, count, o_half + o, m, dtype, RANKS)
            tl.store(out_ptr + i_block * BLOCK + o, b_sum, mask=m)
            o_half += BLOCK
    tl.store(counts_ptr + i_first, count + 1)


@triton.jit(do_not_specialize=["num_rows", "rank"])
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    buffers_ptr,
    signals_ptr,
    counts_ptr,
    aborted_ptr,
    rank,
    num_rows,
    size,
    eps,
    UNIT_OFFSET: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    i_first, step = tl.program_id(0), tl.num_programs(0)
    o_row = tl.arange(0, ROWS)[:, None]
    o_size = tl.arange(0, BLOCK)[None, :]
    m_size = o_size < size
    o = o_row * size + o_size
    b_w = tl.load(weight_ptr + o_size, mask=m_size, other=0.0)  # [1, BLOCK]
    num_tiles = tl.cdiv(num_rows, ROWS)
    wait(DEPENDENT)
    count = tl.load(counts_ptr + i_first)
    p_half = half(buffers_ptr, rank, count, dtype)
    o_half = 0
    for i_tile in range(i_first, num_tiles, step):
        m = m_size & (o_row < num_rows - i_tile * ROWS)
        b_x = tl.load(x_ptr + i_tile * ROWS * size + o, mask=m)
        tl.store(p_half + o_half + o, b_x, mask=m)
        o_half += ROWS * size
    meet(signals_ptr, aborted_ptr, rank, count, RANKS, LANES)
    start_next(DEPENDENT)
    o_half = 0
    for i_tile in range(i_first, num_tiles, step):
        m = m_size & (o_row < num_rows - i_tile * ROWS)
        o_tile = i_tile * ROWS * size + o
        b_x = _sum(buffers_ptr, count, o_half + o, m, dtype, RANKS)
        b_x += tl.load(residual_ptr + o_tile, mask=m, other=0.0)
        tl.store(total_ptr + o_tile, b_x, mask=m)
        b_out = normalize(b_x, b_w, size, eps, UNIT_OFFSET)
        tl.store(out_ptr + o_tile, b_out.to(dtype), mask=m)
        o_half += ROWS * size
    tl.store(counts_ptr + i_first, count + 1)


@triton.jit
def _sum(buffers_ptr, count, o, m, dtype: tl.constexpr, RANKS: tl.constexpr):
    """Return the sum of what all ranks have written for meeting `count`, rounded to `dtype`."""
    b_sum = tl.load(half(buffers_ptr, 0, count, dtype) + o, mask=m, other=0.0).to(tl.float32)
    for i_rank in tl.static_range(1, RANKS):
        b_part = tl.load(half(buffers_ptr, i_rank, count, dtype) + o, mask=m, other=0.0)
        b_sum += b_part.to(tl.float32)
    return b_sum.to(dtype)


def _exchange(peers: Peers, where: torch.device, num_warps: int) -> dict[str, object]:
    """Return the arguments of both kernels that are about the ranks and the launch.

    A program has an SM alone: it may use all registers, in which loads from all ranks are under way
    at once. Left to itself, ptxas saves registers and spills some.
    """
    return {
        "buffers_ptr": peers.buffers,
        "signals_ptr": peers.signals,
        "counts_ptr": peers.counts,
        "aborted_ptr": peers.aborted,
        "rank": peers.rank,
        "RANKS": peers.size,
        "LANES": next_power_of_2(peers.size + 1),
        "maxnreg": min(_REGISTERS // (32 * num_warps), 255),
        **dependent_launch.options(where),
    }


def _check(x: Tensor, peers: Peers) -> None:
    check_dtype("x", x, *FLOATS)
    check_shape("x", x, (None, None))
    check_contiguous("x", x)
    if not device.runs_triton(x):
        raise ValueError(f"x: must be on a GPU (got {x.device})")
    check_device("x", x, peers.counts.device)
    if x.nbytes > MOST_BYTES:
        raise ValueError(f"x: must have at most {MOST_BYTES} bytes (got {x.nbytes})")
