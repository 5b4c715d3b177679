"""Layer normalisation (Ba et al., 2016), alone and fused with the residual addition.

One program normalises one row, or several short ones. A row is read once and held in registers; the
variance is computed in float32 from centred values, which avoids cancellation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import dependent_launch, device
from kernels.checks import FLOATS, check_dtype, check_last_stride, check_like, check_shape
from kernels.dependent_launch import start_next, wait
from kernels.device import cdiv
from kernels.rms_norm import settings


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return `(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension.

    Args:
        x: float [..., H]; the last dimension is contiguous.
        weight: [H], contiguous, of the dtype of `x`.
        bias: like `weight`, or None for zero.
        eps: added to the variance, which is the population variance: divided by H, not H - 1.

    Returns:
        [..., H] in the dtype of `x`, contiguous; computed in float32 and rounded once.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(x, weight, bias)
    if not device.runs_triton(x):
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, bias, out, None, eps)
    return out


def layer_norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `layer_norm(x + residual)` and `x + residual`; changes neither argument.

    Args:
        x, residual: float [..., H], alike; the last dimension is contiguous.
        weight, bias, eps: as in `layer_norm`.

    Returns:
        Two tensors [..., H] in the dtype of `x`; the sum is rounded before it is normalised.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(x, weight, bias)
    check_shape("residual", residual, tuple(x.shape))
    check_like("residual", residual, x)
    check_last_stride("residual", residual)
    if not device.runs_triton(x):
        total = residual + x
        return F.layer_norm(total, weight.shape, weight, bias, eps), total
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, bias, out, total, eps)
    return out, total


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the norm computed in float32 throughout."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return normed if bias is None else normed + bias.float()


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    num_rows,
    size,
    eps,
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
    wait(DEPENDENT)  # also for the weight, which may be that of the checkpoint and 1
    b_x = tl.load(p_x + (o_row * x_stride + o), mask=m, other=0.0)  # [ROWS, BLOCK]
    b_w = tl.load(weight_ptr + o, mask=m_size, other=0.0)  # [1, BLOCK]
    o_out = o_row * size + o
    if residual_ptr is not None:
        p_residual = residual_ptr + i_row * residual_stride
        b_x += tl.load(p_residual + (o_row * residual_stride + o), mask=m, other=0.0)
        tl.store(total_ptr + i_row * size + o_out, b_x, mask=m)
    b_wide = b_x.to(tl.float32)
    b_mean = tl.sum(b_wide, 1) / size  # [ROWS]
    b_centred = tl.where(m, b_wide - b_mean[:, None], 0.0)
    b_variance = tl.sum(b_centred * b_centred, 1) / size
    b_out = b_centred * tl.rsqrt(b_variance + eps)[:, None] * b_w.to(tl.float32)
    if bias_ptr is not None:
        b_out += tl.load(bias_ptr + o, mask=m_size, other=0.0).to(tl.float32)
    start_next(DEPENDENT)
    tl.store(out_ptr + i_row * size + o_out, b_out.to(b_x.dtype), mask=m)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    total: Tensor | None,
    eps: float,
) -> None:
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    residual = None if residual is None else residual.reshape(-1, size)
    num_rows = flat.shape[0]
    if not num_rows:
        return
    tile = settings(size)  # registers per row as in RMSNorm
    _kernel[(cdiv(num_rows, tile["ROWS"]),)](
        x_ptr=flat,
        residual_ptr=residual,
        weight_ptr=weight,
        bias_ptr=bias,
        out_ptr=out,
        total_ptr=total,
        x_stride=flat.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        num_rows=num_rows,
        size=size,
        eps=eps,
        **tile,
        **dependent_launch.options(x.device),
    )


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_dtype("x", x, *FLOATS)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: the last dimension must not be empty (got shape {list(x.shape)})")
    check_last_stride("x", x)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_shape(name, vector, (x.shape[-1],))
            check_like(name, vector, x)
            check_last_stride(name, vector)
