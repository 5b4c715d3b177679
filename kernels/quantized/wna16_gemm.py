"""GEMM of floats and a weight of codes of 4 or 8 bits, which are widened in registers.

The weight is the left operand, and what is computed is the transposed result: matrix instructions
of Hopper take their left operand from registers, and as few as 8 columns of the right one, which
few tokens fill. Of few rows the depth is split (`kernels.quantized.splits`); one row is multiplied
without matrix instructions (`kernels.quantized.wna16_gemv`), and many rows by cuBLAS.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import dependent_launch, device
from kernels.checks import check_device, check_dtype, check_last_stride, check_output, check_shape
from kernels.dependent_launch import fetch, start_next, wait
from kernels.device import cdiv
from kernels.quantized.codes import BITS, Codes, unpack
from kernels.quantized.dequantize import dequantize
from kernels.quantized.splits import MOST_SPLIT, plan_splits, sum_parts
from kernels.quantized.tiles import tile_of
from kernels.quantized.wna16_gemv import takes, wna16_gemv
from kernels.quantized.wna16_sum import add_block, load_scales, scaled_sum

# Rows beyond which cuBLAS and writing the weight in 16 bits take less time. On an H200 cuBLAS takes
# 2.7 ms for 8192 rows of the largest projection of an 8B model, and the tiles below 5.9.
MOST_TILED = 256


def wna16_linear(
    x: Tensor, weight: Codes, bias: Tensor | None, *, invariant: bool = False
) -> Tensor:
    """Return `x` W^T + bias, summed in float32 and rounded once.

    Values of codes are rounded to the type of `x`, which is exact for integers of 8 bits and FP8,
    except for one row. Their scales multiply sums, but with many rows the values, which are rounded
    then.

    Args:
        x: bfloat16 or float16 [M, K], rows contiguous.
        weight: as `kernels.quantized.codes.pack` returns it.
        bias: [N], contiguous, of the dtype of `x`, or None.
        invariant: a row of the result depends on its row of `x` alone, to the last bit.

    Returns:
        [M, N] in the dtype of `x`, contiguous.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(x, weight, bias)
    if not device.runs_triton(x):
        return reference(x, weight, bias).to(x.dtype)
    if not invariant and takes(x, weight):
        return wna16_gemv(x, weight, bias)
    if not invariant and _is_written_out(x, weight):
        return F.linear(x, dequantize(weight, x.dtype), bias)
    (num_rows, depth), num_columns = x.shape, len(weight.packed)
    limits = device.limits(x.device)
    tile = settings(num_rows, weight, limits, invariant=invariant)
    halves = 8 // BITS[weight.kind]
    tiles_n = cdiv(num_columns, tile["BLOCK_N"])
    num_blocks = cdiv(depth, halves * weight.run)
    # Sums of parts are small of few rows.
    per_sm = 4 if tile["IN_WORDS"] and tile["BLOCK_M"] == 16 else 2
    splits = plan_splits(tiles_n, num_blocks, limits.num_sms, per_sm)
    is_split = not invariant and num_rows <= MOST_SPLIT and splits.num_parts > 1
    num_parts, in_each = splits if is_split else (1, num_blocks)
    out = torch.empty(
        (num_parts, num_rows, num_columns),
        dtype=torch.float32 if is_split else x.dtype,
        device=x.device,
    )
    if not num_rows:
        return out[0].to(x.dtype)
    _kernel[(tiles_n * cdiv(num_rows, tile["BLOCK_M"]), num_parts)](
        x_ptr=x,
        bias_ptr=None if is_split else bias,
        out_ptr=out,
        num_rows=num_rows,
        x_stride=x.stride(0),
        NUM_BLOCKS=in_each,
        **weight.pointers(),
        **weight.constants(num_columns),
        **tile,
        **dependent_launch.options(x.device),
    )
    return sum_parts(out, bias, x.dtype) if is_split else out[0]


def reference(x: Tensor, weight: Codes, bias: Tensor | None) -> Tensor:
    """Return the product in float32."""
    result = x.float() @ unpack(weight).t()
    return result if bias is None else result + bias.float()


# Not specialised on the number of rows: another batch must not recompile.
@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    shift_ptr,
    table_ptr,
    factor_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    HALVES: tl.constexpr,
    RUN: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BAND: tl.constexpr,
    IN_WORDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    BLOCK_K: tl.constexpr = HALVES * RUN
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BYTES: tl.constexpr = BLOCKS * RUN  # of a row
    SIZE: tl.constexpr = 2 if IN_WORDS else 1  # bytes that are read together
    i_m, i_n = tile_of(tl.program_id(0), num_rows, N, BLOCK_M, BLOCK_N, BAND)
    i_part = tl.program_id(1)
    o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, RUN)
    m_m, m_n = o_m < num_rows, o_n < N
    p_x = x_ptr + o_m[:, None] * x_stride + o_k[None, :]
    p_row = packed_ptr + tl.minimum(o_n, N - 1).to(tl.int64) * BYTES
    p_w = p_row.to(tl.pointer_type(tl.int16)) if SIZE == 2 else p_row
    p_w = p_w[:, None] + tl.arange(0, RUN // SIZE)[None, :]
    o_scale = o_n // ROWS * (K // GROUP)
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = i_part * NUM_BLOCKS
    fetch(p_row, first * RUN, BYTES, DEPENDENT)
    # Weights alone are read before the end of the kernel before this one, which writes x.
    scales = load_scales(
        first * BLOCK_K, m_n, scale_ptr, shift_ptr, o_scale, K, GROUP, SCALES, HALVES, RUN
    )
    wait(DEPENDENT)
    for i_block in range(first, tl.minimum(first + NUM_BLOCKS, BLOCKS)):
        b_code = tl.load(p_w + i_block * (RUN // SIZE), mask=m_n[:, None], other=0)
        i_next = (i_block + 1) * BLOCK_K
        next_scales = load_scales(
            i_next, m_n, scale_ptr, shift_ptr, o_scale, K, GROUP, SCALES, HALVES, RUN
        )
        b_sum = add_block(
            b_sum,
            b_code,
            p_x,
            m_m,
            i_block * BLOCK_K,
            scales,
            shift_ptr,
            table_ptr,
            K,
            GROUP,
            KIND,
            HALVES,
            RUN,
            NATIVE,
        )
        scales = next_scales
    b_sum = scaled_sum(b_sum, scale_ptr, factor_ptr, o_scale, o_n, m_n, SCALES, GROUP == K)
    if bias_ptr is not None:
        b_sum += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    start_next(DEPENDENT)
    p_out = out_ptr + (i_part.to(tl.int64) * num_rows + o_m)[None, :] * N + o_n[:, None]
    tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=m_n[:, None] & m_m[None, :])


def settings(
    num_rows: int, weight: Codes, limits: device.DeviceLimits, *, invariant: bool = False
) -> dict[str, int]:
    """Return tile sizes, warps and stages for a number of rows, and whether words are read.

    Up to 64 rows are bound by reading the weight: tiles of 64 of its rows, the fewest that a matrix
    instruction of Hopper takes. Of many rows a tile is two warpgroups' of 128 x 128 sums, with up
    to 35 KiB on the way per stage.

    Integers of 4 bits are bound by widening them, too. They are read as words of 16 bits, whose
    codes are pairs where they lie; products need 16 inputs, of which each has every other one.
    Tiles of 128 rows share what is loaded of x. Groups of fewer than 64 inputs are short for the
    instructions of warpgroups, whose sums are waited for: of few rows two warps use those of warps.

    Args:
        invariant: return the same for any number of rows.
    """
    if num_rows > MOST_SPLIT and not invariant:
        stages = 3 if limits.shared_memory > 2**17 else 2
        tile = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": stages}
        return {"BAND": 8, "IN_WORDS": False, **tile}
    rows = 16 if num_rows <= 16 and not invariant else 64
    tile = {"BLOCK_M": rows, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4}
    in_words = weight.kind == "int4" and weight.is_whole and weight.run >= 32
    if in_words and weight.run < 64:
        tile |= {"BLOCK_N": 32, "num_warps": 2} if rows == 16 else {}
    elif in_words and rows == 16:
        tile |= {"BLOCK_N": 128, "num_stages": 3}
    elif in_words:  # before Hopper x is kept in registers too
        tile |= {"BLOCK_N": 128, "num_warps": 4 if limits.capability >= (9, 0) else 8}
    return {"BAND": 8, "IN_WORDS": in_words, **tile}


def _is_written_out(x: Tensor, weight: Codes) -> bool:
    """Return whether the product is of the weight written out.

    With tables it always is: to look them up for each tile of rows takes longer than to write and
    read the weight: 0.33 ms for one row of that projection.
    """
    return len(x) > MOST_TILED or weight.kind == "table4"


def _check(x: Tensor, weight: Codes, bias: Tensor | None) -> None:
    check_dtype("x", x, torch.bfloat16, torch.float16)
    check_shape("x", x, (None, weight.depth))
    check_last_stride("x", x)
    check_device("weight", weight.packed, x.device)
    if bias is not None:
        check_output("bias", bias, (len(weight.packed),), x.dtype, x.device)
