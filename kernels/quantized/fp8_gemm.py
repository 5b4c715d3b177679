"""GEMM of FP8 activations and an FP8 weight, with scales of rows or of blocks.

Sums are float32. On Hopper the matrix units keep fewer bits of sums of FP8, so these are added up
in registers after each block of 128 inputs (DeepSeek-V3, 2024). Of few rows the depth is split;
those of many rows are cuBLAS's products where it has them: not of blocks, and in bfloat16 alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import dependent_launch, device
from kernels.checks import check_contiguous, check_device, check_dtype, check_output, check_shape
from kernels.dependent_launch import fetch, start_next, wait
from kernels.device import cdiv
from kernels.e4m3 import FP8
from kernels.quantized.splits import MOST_SPLIT, plan_splits, sum_parts
from kernels.quantized.tiles import tile_of

GROUP = 128  # inputs that share a scale, where those are of blocks
_DTYPES = (torch.bfloat16, torch.float16)


def fp8_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    invariant: bool = False,
) -> Tensor:
    """Return (`x` * `x_scale`) (`weight` * `weight_scale`)^T + bias.

    Args:
        x: float8_e4m3fn [M, K], contiguous.
        x_scale: float32 [M, 1], or [M, K / 128]: of 128 inputs each.
        weight: float8_e4m3fn [N, K], contiguous.
        weight_scale: float32 [N, 1], or [N / R, K / 128]: of blocks of R output channels.
        bias: [N], contiguous, of type `dtype`, or None.
        dtype: of the result, bfloat16 or float16.
        invariant: a row of the result depends on its row of `x` alone, to the last bit.

    Returns:
        [M, N], contiguous.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(x, x_scale, weight, weight_scale, bias, dtype)
    if not device.runs_triton(x):
        return reference(x, x_scale, weight, weight_scale, bias).to(dtype)
    (num_rows, depth), num_columns = x.shape, len(weight)
    if not invariant and num_rows > MOST_SPLIT and _is_cublas(x, weight, weight_scale, dtype):
        return torch._scaled_mm(
            x, weight.t(), x_scale, weight_scale.t(), bias=bias, out_dtype=dtype
        )
    limits = device.limits(x.device)
    tile = settings(num_rows, limits.capability, invariant=invariant)
    tiles_n, num_blocks = cdiv(num_columns, tile["BLOCK_N"]), cdiv(depth, GROUP)
    splits = plan_splits(tiles_n, num_blocks, limits.num_sms)
    is_split = not invariant and num_rows <= MOST_SPLIT and splits.num_parts > 1
    num_parts, in_each = splits if is_split else (1, num_blocks)
    out = torch.empty(
        (num_parts, num_rows, num_columns),
        dtype=torch.float32 if is_split else dtype,
        device=x.device,
    )
    if not num_rows:
        return out[0].to(dtype)
    _kernel[(tiles_n * cdiv(num_rows, tile["BLOCK_M"]), num_parts)](
        x_ptr=x,
        x_scale_ptr=x_scale,
        weight_ptr=weight,
        weight_scale_ptr=weight_scale,
        bias_ptr=None if is_split else bias,
        out_ptr=out,
        num_rows=num_rows,
        N=num_columns,
        K=depth,
        ROWS=num_columns // len(weight_scale),
        IN_BLOCKS=weight_scale.shape[1] > 1,
        NUM_BLOCKS=in_each,
        **tile,
        **dependent_launch.options(x.device),
    )
    return sum_parts(out, bias, dtype) if is_split else out[0]


def reference(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the product in float32."""
    depth = x.shape[1]
    columns = weight_scale.repeat_interleave(len(weight) // len(weight_scale), 0)
    rows, columns = (_expand(scale, depth) for scale in (x_scale, columns))
    result = (x.float() * rows) @ (weight.float() * columns).t()
    return result if bias is None else result + bias.float()


def _expand(scale: Tensor, depth: int) -> Tensor:
    """Return the scale of each of `depth` inputs, or [rows, 1]."""
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(GROUP, 1)[:, :depth]


# Not specialised on the number of rows: another batch must not recompile.
@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_m, i_n = tile_of(tl.program_id(0), num_rows, N, BLOCK_M, BLOCK_N, BAND)
    i_part = tl.program_id(1)
    o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_m, m_n = o_m < num_rows, o_n < N
    SCALES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K if IN_BLOCKS else 1
    p_x = x_ptr + o_m[:, None] * K + o_k[None, :]
    p_w = weight_ptr + o_n.to(tl.int64)[:, None] * K + o_k[None, :]
    p_x_scale = x_scale_ptr + o_m * SCALES
    if ROWS % BLOCK_N:
        p_w_scale = weight_scale_ptr + o_n // ROWS * SCALES
    else:  # one for the tile
        p_w_scale = weight_scale_ptr + i_n * BLOCK_N // ROWS * SCALES
    first = i_part * NUM_BLOCKS
    last = tl.minimum(first + NUM_BLOCKS, (K + BLOCK_K - 1) // BLOCK_K)
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    p_row = weight_ptr + tl.minimum(o_n, N - 1).to(tl.int64) * K
    fetch(p_row, first * BLOCK_K, K, DEPENDENT)
    wait(DEPENDENT)
    for i_block in range(first, last):
        i_k = i_block * BLOCK_K
        m_x, m_w = m_m[:, None], m_n[:, None]
        if K % BLOCK_K:
            m_x, m_w = m_x & (i_k + o_k < K)[None, :], m_w & (i_k + o_k < K)[None, :]
        b_x = tl.load(p_x + i_k, mask=m_x, other=0.0)  # [BLOCK_M, BLOCK_K]
        b_w = tl.load(p_w + i_k, mask=m_w, other=0.0)  # [BLOCK_N, BLOCK_K]
        b_dot = _dot(b_x, b_w)
        if IN_BLOCKS:
            b_dot *= tl.load(p_x_scale + i_block, mask=m_m, other=0.0)[:, None]
            if ROWS % BLOCK_N:
                b_dot *= tl.load(p_w_scale + i_block, mask=m_n, other=0.0)[None, :]
            else:
                b_dot *= tl.load(p_w_scale + i_block)
        b_sum += b_dot
    if not IN_BLOCKS:
        b_sum *= tl.load(p_x_scale, mask=m_m, other=0.0)[:, None]
        if ROWS % BLOCK_N:
            b_sum *= tl.load(p_w_scale, mask=m_n, other=0.0)[None, :]
        else:
            b_sum *= tl.load(p_w_scale)
    if bias_ptr is not None:
        b_sum += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    start_next(DEPENDENT)
    p_out = out_ptr + (i_part.to(tl.int64) * num_rows + o_m)[:, None] * N + o_n[None, :]
    tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def _dot(b_x, b_w):
    """Return `b_x` [M, K] `b_w`^T [K, N], with few rows as the transpose of the other product.

    Matrix instructions of Hopper take 64 rows of the left operand, but as few as 8 columns.
    """
    if b_x.shape[0] < 64:
        b_dot = tl.trans(tl.dot(b_w, tl.trans(b_x)))
    else:
        b_dot = tl.dot(b_x, tl.trans(b_w))
    return b_dot


def _is_cublas(x: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> bool:
    """Return whether torch's product takes these operands."""
    is_aligned = not (len(weight) % 16 or weight.shape[1] % 16)
    in_rows = weight_scale.shape == (len(weight), 1)
    return x.device.type == "cuda" and dtype == torch.bfloat16 and in_rows and is_aligned


def settings(
    num_rows: int, capability: tuple[int, int], *, invariant: bool = False
) -> dict[str, int]:
    """Return tile sizes, warps and stages for a number of rows.

    Up to 64 rows are bound by reading the weight: tiles of 64 of its rows, the fewest that a matrix
    instruction of Hopper takes, have 24 KiB of it on the way, and several share an SM. A large tile
    is two warpgroups' of 128 x 128 sums, or half of it where instructions are those of single
    warps: scales of blocks need a second set of sums.

    Args:
        invariant: return the same for any number of rows.
    """
    if num_rows <= MOST_SPLIT or invariant:
        rows = 16 if num_rows <= 16 and not invariant else 64
        tile = {"BLOCK_M": rows, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4}
    else:
        columns = 128 if capability[0] in (9, 10) else 64
        tile = {"BLOCK_M": 128, "BLOCK_N": columns, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_K": GROUP, "BAND": 8, **tile}


def _check(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> None:
    check_shape("x", x, (None, None))
    check_output("weight", weight, (len(weight), x.shape[1]), FP8, x.device)
    if not weight.numel():
        raise ValueError(f"weight: must not be empty (got shape {list(weight.shape)})")
    check_output("x", x, tuple(x.shape), FP8, weight.device)
    check_shape("weight_scale", weight_scale, (None, None))
    num_rows, num_scales = weight_scale.shape
    if num_scales not in (1, cdiv(x.shape[1], GROUP)):
        raise ValueError(
            f"weight_scale: must have one scale per row, or one for each {GROUP} inputs of a row "
            f"(got shape {list(weight_scale.shape)} for a weight of {list(weight.shape)})"
        )
    if not num_rows or len(weight) % num_rows:
        raise ValueError(
            f"weight_scale: its number of rows must divide that of the weight, {len(weight)} (got "
            f"shape {list(weight_scale.shape)})"
        )
    check_shape("x_scale", x_scale, (len(x), num_scales))
    for name, scale in (("x_scale", x_scale), ("weight_scale", weight_scale)):
        check_dtype(name, scale, torch.float32)
        check_device(name, scale, x.device)
        check_contiguous(name, scale)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: must be {_DTYPES[0]} or {_DTYPES[1]} (got {dtype})")
    if bias is not None:
        check_output("bias", bias, (len(weight),), dtype, x.device)
