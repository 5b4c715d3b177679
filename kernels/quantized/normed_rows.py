"""RMS normalisation, quantised to FP8 for the product that follows, alone and after an addition.

One program computes one row, which it reads once and holds in registers: the normalised row is
neither written nor read again in 16 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import dependent_launch, device
from kernels.checks import check_dtype, check_last_stride, check_like, check_shape
from kernels.dependent_launch import start_next, wait
from kernels.e4m3 import FP8
from kernels.quantized import rows
from kernels.quantized.gated_rows import settings
from kernels.quantized.rows import check_scale, quantize_tile
from kernels.rms_norm import rms_norm


def normed_rows(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    unit_offset: bool,
    group: int | None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `quantize_rows` does of `rms_norm(x + residual)`, and the sum.

    Args:
        x: bfloat16 or float16 [M, K], rows contiguous.
        residual: as `x`, or None, for zeros.
        weight, eps, unit_offset: as in `rms_norm`.
        group: values that share a scale, a power of two that divides K; None: all of a row.
        scale: float32 [1], positive: of all; None: each group has that of its largest value.

    Returns:
        float8_e4m3fn [M, K], contiguous; float32 [M, K / group] or [M, 1]; and the sum as `x`, or
        `x` itself.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(x, residual, weight, group, scale)
    num_rows, size = x.shape
    shape = num_rows, size // (group or size)
    if not device.runs_triton(x):
        total = x if residual is None else x + residual
        normed = rms_norm(total, weight, eps, unit_offset=unit_offset)
        codes, scales = rows.reference(normed.view(-1, group or size), scale)
        return codes.view(num_rows, size), scales.view(shape), total
    out = torch.empty(num_rows, size, dtype=FP8, device=x.device)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    tile = settings(size)
    if num_rows:
        _kernel[(num_rows,)](
            x_ptr=x,
            residual_ptr=residual,
            weight_ptr=weight,
            scale_ptr=scale,
            out_ptr=out.view(torch.uint8),
            scales_ptr=scales,
            total_ptr=None if residual is None else total,
            x_stride=x.stride(0),
            residual_stride=0 if residual is None else residual.stride(0),
            eps=eps,
            SIZE=size,
            GROUP=group or tile["BLOCK"],
            SCALES=shape[1],
            UNIT_OFFSET=unit_offset,
            NATIVE=device.converts_fp8(x.device),
            **tile,
            **dependent_launch.options(x.device),
        )
    return out, scales, total


@triton.jit
def _kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    scales_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_group = tl.arange(0, BLOCK // GROUP)
    o = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [groups, GROUP]
    m = o < SIZE
    b_w = tl.load(weight_ptr + o, mask=m, other=0.0)
    wait(DEPENDENT)
    b_x = tl.load(x_ptr + i_row * x_stride + o, mask=m, other=0.0)
    if residual_ptr is not None:
        b_x += tl.load(residual_ptr + i_row * residual_stride + o, mask=m, other=0.0)
        tl.store(total_ptr + i_row * SIZE + o, b_x, mask=m)
    b_wide = b_x.to(tl.float32)
    mean = tl.sum(tl.sum(b_wide * b_wide, 1), 0) / SIZE
    b_normed = b_wide * tl.rsqrt(mean + eps)
    if UNIT_OFFSET:
        b_normed = b_normed * (1.0 + b_w.to(tl.float32))
    else:
        b_normed = b_normed.to(b_w.dtype) * b_w
    b_normed = b_normed.to(b_x.dtype).to(tl.float32)  # rounded as the norm alone is
    b_code, b_scale = quantize_tile(b_normed, scale_ptr, NATIVE)
    start_next(DEPENDENT)
    tl.store(out_ptr + i_row * SIZE + o, b_code, mask=m)
    tl.store(scales_ptr + i_row * SCALES + o_group, b_scale, mask=o_group < SCALES)


def _check(
    x: Tensor, residual: Tensor | None, weight: Tensor, group: int | None, scale: Tensor | None
) -> None:
    check_dtype("x", x, torch.bfloat16, torch.float16)
    check_shape("x", x, (None, None))
    check_last_stride("x", x)
    size = x.shape[1]
    if not size:
        raise ValueError(f"x: rows must not be empty (got shape {list(x.shape)})")
    if residual is not None:
        check_shape("residual", residual, tuple(x.shape))
        check_like("residual", residual, x)
        check_last_stride("residual", residual)
    check_shape("weight", weight, (size,))
    check_like("weight", weight, x)
    check_last_stride("weight", weight)
    if group is not None and (group & group - 1 or group > 128 or size % group):
        raise ValueError(f"group: must be a power of 2 up to 128 that divides {size} (got {group})")
    check_scale(scale, x.device)
