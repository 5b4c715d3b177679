"""RMS normalisation (Zhang and Sennrich, 2019), alone and fused with the residual addition.

One program normalises one row, or several short ones. A row is read once, held in registers and
reduced in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import cpu, dependent_launch, device
from kernels.checks import FLOATS, check_dtype, check_last_stride, check_like, check_shape
from kernels.dependent_launch import start_next, wait
from kernels.device import cdiv, next_power_of_2


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    Args:
        x: float [..., H]; the last dimension is contiguous.
        weight: [H], contiguous, of the dtype of `x`; a parameter, which no kernel writes.
        eps: added to the mean square.
        unit_offset: Gemma's variant: scale by `1 + weight`, and round only after that.

    Returns:
        [..., H] in the dtype of `x`, contiguous; normalised in float32, rounded, then weighted.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(x, weight)
    if not device.runs_triton(x):
        if (fast := cpu.fast_operations(x)) is not None:
            normed: Tensor = fast.rms_norm(x, weight, eps, unit_offset)
            return normed
        return _torch(x, weight, eps, unit_offset)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps, unit_offset)
    return out


def rms_norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm(x + residual)` and `x + residual`; changes neither argument.

    Args:
        x, residual: float [..., H], alike; the last dimension is contiguous.
        weight, eps, unit_offset: as in `rms_norm`.

    Returns:
        Two tensors [..., H] in the dtype of `x`; the sum is rounded before it is normalised.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(x, weight)
    check_shape("residual", residual, tuple(x.shape))
    check_like("residual", residual, x)
    check_last_stride("residual", residual)
    if not device.runs_triton(x):
        if (fast := cpu.fast_operations(x)) is not None:
            pair: tuple[Tensor, Tensor] = fast.rms_norm_add(x, residual, weight, eps, unit_offset)
            return pair
        total = residual + x
        return _torch(total, weight, eps, unit_offset), total
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, out, total, eps, unit_offset)
    return out, total


def reference(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Return the norm computed in float32 throughout."""
    wide, scale = x.float(), weight.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed * (1 + scale if unit_offset else scale)


def _torch(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    num_rows,
    size,
    eps,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) * ROWS
    o_row = tl.arange(0, ROWS).to(tl.int64)[:, None]  # from i_row on
    o = tl.arange(0, BLOCK)[None, :]
    m_size = o < size
    m = m_size & (o_row < num_rows - i_row)
    p_x = x_ptr + i_row * x_stride
    b_w = tl.load(weight_ptr + o, mask=m_size, other=0.0)  # [1, BLOCK]
    wait(DEPENDENT)
    b_x = tl.load(p_x + (o_row * x_stride + o), mask=m, other=0.0)  # [ROWS, BLOCK]
    o_out = o_row * size + o
    if ADD:
        p_residual = residual_ptr + i_row * residual_stride
        b_x += tl.load(p_residual + (o_row * residual_stride + o), mask=m, other=0.0)
        tl.store(total_ptr + i_row * size + o_out, b_x, mask=m)
    b_out = normalize(b_x, b_w, size, eps, UNIT_OFFSET)
    start_next(DEPENDENT)
    tl.store(out_ptr + i_row * size + o_out, b_out.to(b_x.dtype), mask=m)


@triton.jit
def normalize(b_x, b_w, size, eps, UNIT_OFFSET: tl.constexpr):
    """Return the norms of rows [ROWS, BLOCK], 0 beyond `size`, times the weight [1, BLOCK]."""
    b_wide = b_x.to(tl.float32)
    b_mean = tl.sum(b_wide * b_wide, 1) / size  # [ROWS]
    b_normed = b_wide * tl.rsqrt(b_mean + eps)[:, None]
    if UNIT_OFFSET:
        b_out = b_normed * (1.0 + b_w.to(tl.float32))
    else:
        b_out = b_normed.to(b_w.dtype) * b_w
    return b_out


def settings(size: int) -> dict[str, int]:
    """Return tile size and warps for rows of `size`; short rows share a program.

    A thread holds 16 values in 40 registers: two vectorised loads of each tensor are in flight, and
    occupancy is 48 warps per SM. Beyond 8192 values this would take more than 16 warps, which
    leaves no room for a second program that loads while the first reduces, so threads hold 32
    values, in 64 to 74 registers. Rows beyond 16384, which no model has yet, fill an SM alone;
    beyond 32768 they spill.
    """
    block = next_power_of_2(size)
    rows = max(1024 // block, 1)
    warps = 32 if block > 16384 else min(max(block // 512, 2), 16)
    return {"ROWS": rows, "BLOCK": block, "num_warps": warps}


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    unit_offset: bool,
) -> None:
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    residual = None if residual is None else residual.reshape(-1, size)
    num_rows = flat.shape[0]
    if not num_rows:
        return
    tile = settings(size)
    _kernel[(cdiv(num_rows, tile["ROWS"]),)](
        x_ptr=flat,
        residual_ptr=residual,
        weight_ptr=weight,
        out_ptr=out,
        total_ptr=total,
        x_stride=flat.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        num_rows=num_rows,
        size=size,
        eps=eps,
        ADD=residual is not None,
        UNIT_OFFSET=unit_offset,
        # A square and its addition, fused in one kernel and not in another, would round apart: the
        # norm of a sum over ranks has the same bits.
        enable_fp_fusion=False,
        **tile,
        **dependent_launch.options(x.device),
    )


def _check(x: Tensor, weight: Tensor) -> None:
    check_dtype("x", x, *FLOATS)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: the last dimension must not be empty (got shape {list(x.shape)})")
    check_last_stride("x", x)
    check_shape("weight", weight, (x.shape[-1],))
    check_like("weight", weight, x)
    check_last_stride("weight", weight)
