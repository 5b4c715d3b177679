"""Batch-invariant matmul: a row's result does not depend on the other rows, to the last bit.

A library chooses among kernels, tiles and splits of the depth by the number of rows; here all of
that is fixed by the weight. A tile of the result is summed by one program in the order of the depth
(a persistent kernel: programs take tiles in turn), so that a row's sums are the same whatever rows
are computed with it, and whatever their number is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_dtype,
    check_last_stride,
    check_like,
    check_shape,
)
from kernels.device import cdiv

_ALIGNED = 16  # values: rows of the result begin at whole vectors for those who read them


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """Return `x` W^T + bias, summed in float32 and rounded once.

    Args:
        x: float [M, K], rows contiguous.
        weight: [N, K], contiguous, of the dtype of `x`.
        bias: [N], contiguous, of the dtype of `x`, or None.
        wide: return float32.

    Returns:
        [M, N] in the dtype of `x` unless `wide`, rows contiguous.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(x, weight, bias)
    if not device.runs_triton(x):
        return reference(x, weight, bias).to(torch.float32 if wide else x.dtype)
    num_rows, num_columns = len(x), len(weight)
    out = torch.empty(
        num_rows,
        cdiv(num_columns, _ALIGNED) * _ALIGNED,
        dtype=torch.float32 if wide else x.dtype,
        device=x.device,
    )[:, :num_columns]
    if num_rows:
        _launch(x, weight, bias, out)
    return out


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product in float32."""
    result = x.float() @ weight.float().t()
    return result if bias is None else result + bias.float()


# Not specialised on the number of rows: another batch must not recompile.
@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    # Tiles are taken in bands of BAND row tiles, column by column: the rows of a band stay in the
    # L2 cache, and the weight is read once per band.
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    for i_tile in range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0)):
        i_band = i_tile // (BAND * TILES_N)
        height = tl.minimum(tiles_m - i_band * BAND, BAND)
        i_in_band = i_tile % (BAND * TILES_N)
        i_m, i_n = i_band * BAND + i_in_band % height, i_in_band // height
        o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = tl.arange(0, BLOCK_K)
        m_m, m_n = o_m < num_rows, o_n < N
        p_x = x_ptr + o_m[:, None] * x_stride + o_k[None, :]
        p_w = weight_ptr + o_n.to(tl.int64)[:, None] * K + o_k[None, :]
        b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_k in range(0, K, BLOCK_K):
            m_x, m_w = m_m[:, None], m_n[:, None]
            if K % BLOCK_K:
                m_x, m_w = m_x & (i_k + o_k < K)[None, :], m_w & (i_k + o_k < K)[None, :]
            b_x = tl.load(p_x + i_k, mask=m_x, other=0.0)  # [BLOCK_M, BLOCK_K]
            b_w = tl.load(p_w + i_k, mask=m_w, other=0.0)  # [BLOCK_N, BLOCK_K]
            b_sum = tl.dot(b_x, tl.trans(b_w), b_sum, input_precision="ieee")
        if bias_ptr is not None:
            b_sum += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
        p_out = out_ptr + o_m[:, None] * out_stride + o_n[None, :]
        tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


def settings(dtype: torch.dtype) -> dict[str, int]:
    """Return tile sizes, warps and stages; they depend on nothing but the dtype.

    A step of few rows is bound by reading the weight: narrow tiles of N give each of its 4096
    columns' programs an SM of their own, with 24 KiB per stage on the way. 128 rows are two
    warpgroups' instructions on Hopper. Two programs share an SM. No matrix instruction has full
    float32 precision; there larger tiles spill.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    tiles = settings(x.dtype)
    num_tiles = cdiv(len(x), tiles["BLOCK_M"]) * cdiv(len(weight), tiles["BLOCK_N"])
    _kernel[(min(num_tiles, 2 * device.limits(x.device).num_sms),)](
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=bias,
        out_ptr=out,
        num_rows=len(x),
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        N=len(weight),
        K=weight.shape[1],
        BAND=8,
        **tiles,
    )


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_dtype("x", x, *FLOATS)
    check_shape("x", x, (None, None))
    check_last_stride("x", x)
    check_shape("weight", weight, (None, x.shape[1]))
    check_like("weight", weight, x)
    check_contiguous("weight", weight)
    if not weight.numel():
        raise ValueError(f"weight: must not be empty (got shape {list(weight.shape)})")
    if bias is not None:
        check_shape("bias", bias, (len(weight),))
        check_like("bias", bias, x)
        check_contiguous("bias", bias)
