"""Quantisation of rows to FP8 (E4M3): each with the scale of its largest value, or all with one.

Of activations, a row is a token, or 128 of its values (DeepSeek-V3, 2024). One program quantises
one row, or several short ones, each of which is read once and held in registers.
"""

from __future__ import annotations

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
    check_last_stride,
    check_shape,
)
from kernels.dependent_launch import start_next, wait
from kernels.device import cdiv
from kernels.e4m3 import FP8, FP8_MAX, to_e4m3
from kernels.rms_norm import settings

SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)  # of scales: of rows of zeros


def quantize_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `x` / scale in FP8, rounded to nearest and saturated, and the scale of each row.

    Args:
        x: float [M, K], rows contiguous.
        scale: float32 [1], positive: of all rows; None: of each, that of its largest value.

    Returns:
        float8_e4m3fn [M, K], contiguous, and float32 [M].

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(x, scale)
    if not device.runs_triton(x):
        return reference(x, scale)
    num_rows, size = x.shape
    out = torch.empty(num_rows, size, dtype=FP8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    tile = settings(size)
    if num_rows:
        _kernel[(cdiv(num_rows, tile["ROWS"]),)](
            x_ptr=x,
            scale_ptr=scale,
            out_ptr=out.view(torch.uint8),
            scales_ptr=scales,
            x_stride=x.stride(0),
            num_rows=num_rows,
            size=size,
            NATIVE=device.converts_fp8(x.device),
            **tile,
            **dependent_launch.options(x.device),
        )
    return out, scales


def reference(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what `quantize_rows` does, in torch."""
    rows = x.float()
    scales = (rows.abs().amax(1) / FP8_MAX).clamp_min(SMALLEST.value)
    if scale is not None:
        scales = scale.expand(len(x)).contiguous()
    return (rows * scales.reciprocal()[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x_ptr,
    scale_ptr,
    out_ptr,
    scales_ptr,
    x_stride,
    num_rows,
    size,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64) * ROWS
    o_row = tl.arange(0, ROWS).to(tl.int64)  # from i_row on
    o = tl.arange(0, BLOCK)[None, :]
    m_row = o_row < num_rows - i_row
    m = m_row[:, None] & (o < size)
    p_x = x_ptr + i_row * x_stride + (o_row[:, None] * x_stride + o)
    b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    b_code, b_scale = quantize_tile(b_x, scale_ptr, NATIVE)
    start_next(DEPENDENT)
    tl.store(out_ptr + i_row * size + (o_row[:, None] * size + o), b_code, mask=m)
    tl.store(scales_ptr + i_row + o_row, b_scale, mask=m_row)


@triton.jit
def quantize_tile(b_x, scale_ptr, NATIVE: tl.constexpr):
    """Return rows float32 [R, K] as FP8, in bytes, and the scale of each; or all with one scale."""
    if scale_ptr is not None:
        b_scale = tl.load(scale_ptr) + tl.zeros([b_x.shape[0]], tl.float32)
    else:
        b_size = tl.where(b_x == b_x, tl.abs(b_x), 0.0)  # 0 of NaN, which stays NaN below
        b_scale = tl.maximum(tl.max(b_size, 1) / 448.0, SMALLEST)
    # Correctly rounded, as the reference's is: an error in the last bit may move a value by a step.
    return to_e4m3(b_x * tl.div_rn(1.0, b_scale)[:, None], NATIVE), b_scale


def check_scale(scale: Tensor | None, where: torch.device) -> None:
    """Raise ValueError if `scale` is not one float32 on that device, or None."""
    if scale is not None:
        check_shape("scale", scale, (1,))
        check_dtype("scale", scale, torch.float32)
        check_contiguous("scale", scale)
        check_device("scale", scale, where)


def _check(x: Tensor, scale: Tensor | None) -> None:
    check_dtype("x", x, *FLOATS)
    check_shape("x", x, (None, None))
    check_last_stride("x", x)
    if not x.shape[1]:
        raise ValueError(f"x: rows must not be empty (got shape {list(x.shape)})")
    check_scale(scale, x.device)
