"""GEMV: one row times a weight of codes of 4 or 8 bits, without matrix instructions.

A step of one sequence is bound by reading the weights. A program of `wna16_gemm` waits in turn
for each block of codes, shifts and scales, and takes 5 instructions per weight of 4 bits: more than
there is time for. One of this kernel computes 8 outputs over the whole depth, in 3 to 5 of them
per weight, and no second launch adds parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import dependent_launch, device
from kernels.dependent_launch import fetch, start_next, wait
from kernels.device import cdiv
from kernels.quantized.codes import Codes
from kernels.quantized.wna16_sum import scale_of

_KINDS = ("int4", "int8", "e4m3", "e2m1")
_ALIGNMENT = 16  # bytes that are read at once, of x; the layout of codes has it


def takes(x: Tensor, weight: Codes) -> bool:
    """Return whether `wna16_gemv` multiplies them."""
    return len(x) == 1 and weight.kind in _KINDS and _is_aligned(x, weight.packed)


def wna16_gemv(x: Tensor, weight: Codes, bias: Tensor | None) -> Tensor:
    """Return `x` W^T + bias, summed in float32 and rounded once.

    Values of codes are not rounded. Inputs of integers beyond 2^47 become infinite, those of floats
    beyond 2^67.

    Args:
        x: bfloat16 or float16 [1, K].
        weight: that `takes`; of K inputs.
        bias: [N], contiguous, of the dtype of `x`, or None.

    Returns:
        [1, N] in the dtype of `x`.
    """
    out = torch.empty(1, weight.num_columns, dtype=x.dtype, device=x.device)
    num_bytes = weight.packed.shape[1]
    tile = settings(weight.num_columns, num_bytes, device.limits(x.device).num_sms)
    pointers, constants = weight.pointers(), weight.constants(weight.num_columns)
    del pointers["table_ptr"], constants["NATIVE"]
    row_kernel[(cdiv(weight.num_columns, tile["BLOCK_N"]),)](
        x_ptr=x,
        bias_ptr=bias,
        out_ptr=out,
        LANES=32 * tile["num_warps"],
        **pointers,
        **constants,
        **tile,
        **dependent_launch.options(x.device),
    )
    return out


def _is_aligned(*tensors: Tensor) -> bool:
    return all(not tensor.data_ptr() % _ALIGNMENT for tensor in tensors)


def settings(num_columns: int, num_bytes: int, num_sms: int) -> dict[str, int]:
    """Return the rows of a tile of the weight, and warps, for a weight of so many bytes in a row.

    Of 8 rows a thread has 128 bytes on the way, and inputs are widened once for all of them. A warp
    alone exchanges no sums; where that makes fewer than 16 on an SM, two or four share a tile. Of 2
    to 16 rows and 1 to 4 warps these were the fastest on an H200 for the layers of an 8B model and
    of one of 0.5B, or within a tenth of the fastest.
    """
    # The interpreter runs one program after the other.
    rows = 64 if device.INTERPRETED else 8
    warps = 1
    programs = cdiv(num_columns, rows)
    while warps < 4 and 2 * warps * programs <= 16 * num_sms and 512 * warps < num_bytes:
        warps *= 2
    return {"BLOCK_N": rows, "num_warps": warps, "num_stages": 1}


@triton.jit
def row_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    shift_ptr,
    factor_ptr,
    bias_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    HALVES: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute BLOCK_N outputs; LANES is the number of threads, each with four words of a row."""
    BLOCKS: tl.constexpr = (K + HALVES * RUN - 1) // (HALVES * RUN)
    WORDS: tl.constexpr = (BLOCKS * RUN if HALVES == 2 else K) // 4  # of a row
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    WHOLE: tl.constexpr = GROUP % (HALVES * RUN) == 0  # low and high codes share a scale
    IS_INT: tl.constexpr = KIND == "int4" or KIND == "int8"
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    o_lane = tl.arange(0, LANES) * 4
    o_pair = tl.arange(0, 2 * LANES)
    o_word = o_pair // 2 * 4 + o_pair % 2  # the first two of a thread
    p_w = packed_ptr.to(tl.pointer_type(tl.int32)) + o_n.to(tl.int64)[:, None] * WORDS
    fetch(packed_ptr + tl.minimum(o_n, N - 1).to(tl.int64) * (4 * WORDS), 0, 4 * WORDS, DEPENDENT)
    wait(DEPENDENT)
    o_scale = (o_n // ROWS * GROUPS)[:, None]
    b_sum = tl.zeros([BLOCK_N, LANES], tl.float32)
    if GROUP == K and IS_INT:
        b_middle_of_all = _middle(shift_ptr, o_scale, m_n[:, None], KIND)
    for i_word in range(0, WORDS, 4 * LANES):
        o_first = i_word + o_word
        m_w = m_n[:, None] & (o_first < WORDS)[None, :]
        # Read once: the inputs are to stay in the caches.
        p_first = p_w + o_first[None, :]
        b_first = tl.load(p_first, mask=m_w, other=0, eviction_policy="evict_first")
        b_second = tl.load(p_first + 2, mask=m_w, other=0, eviction_policy="evict_first")
        b_pair = tl.zeros([BLOCK_N, 2 * LANES], tl.float32)
        b_x = tl.zeros([2 * LANES], tl.float32)
        for i_half in tl.static_range(HALVES):
            o_x = _first_input(o_first, i_half, HALVES, RUN)
            b_pair, b_x = _add_products(b_pair, b_x, b_first, x_ptr, o_x, K, KIND, i_half)
            b_pair, b_x = _add_products(b_pair, b_x, b_second, x_ptr, o_x + 8, K, KIND, i_half)
            if not WHOLE or i_half == HALVES - 1:
                b_part = tl.sum(tl.reshape(b_pair, [BLOCK_N, LANES, 2]), 2)
                i_k = _first_input(i_word + o_lane, 0 if WHOLE else i_half, HALVES, RUN)
                m_s = m_n[:, None] & (i_k < K)[None, :]
                # None is contiguous; but so they lie in threads as the sums do.
                o_s = tl.max_contiguous(o_scale + (i_k // GROUP)[None, :], [1, 2])
                if IS_INT:
                    if GROUP == K:
                        b_middle = b_middle_of_all
                    else:
                        b_middle = _middle(shift_ptr, o_s, m_s, KIND)
                    b_part -= b_middle * tl.sum(tl.reshape(b_x, [LANES, 2]), 1)[None, :]
                if GROUP != K:
                    b_part *= scale_of(scale_ptr + o_s, m_s, SCALES)
                b_sum += b_part
                b_pair = tl.zeros([BLOCK_N, 2 * LANES], tl.float32)
                b_x = tl.zeros([2 * LANES], tl.float32)
    start_next(DEPENDENT)
    REST: tl.constexpr = 2.0**69 if IS_INT else (2.0**66 if KIND == "e2m1" else 2.0**60)
    b_out = tl.sum(b_sum, 1) * REST
    if GROUP == K:
        b_out *= scale_of(scale_ptr + o_n // ROWS, m_n, SCALES)
    if factor_ptr is not None:
        b_out *= tl.load(factor_ptr + o_n, mask=m_n, other=0.0)
    if bias_ptr is not None:
        b_out += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + o_n, b_out.to(out_ptr.dtype.element_ty), mask=m_n)


@triton.jit
def _first_input(o_word, i_half: tl.constexpr, HALVES: tl.constexpr, RUN: tl.constexpr):
    """Return the input of the first code of a word, of its low or its high bits."""
    o_k = 4 * o_word
    if HALVES == 2:
        o_k = o_k // RUN * (2 * RUN) + o_k % RUN + i_half * RUN
    return o_k


@triton.jit
def _add_products(
    b_sum, b_x_sum, b_word, x_ptr, o_x, K: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr
):
    """Return `b_sum` plus the products of four codes of each word, and `b_x_sum` plus those inputs.

    Args:
        b_sum: float32 [N, W], of products times 2^-69 of integers, 2^-66 of E2M1 and 2^-60 of E4M3.
        b_x_sum: float32 [W], of x times 2^-69; as it is for floats.
        b_word: int32 [N, W].
        o_x: [W], the inputs at which words begin, even multiples of four.
        HALF: whether the codes are in the low (0) or the high (1) four bits of bytes.
    """
    IS_INT: tl.constexpr = KIND == "int4" or KIND == "int8"
    if IS_INT:
        # The units of codes in place are 2^-149 and, of the second byte, 2^-141.
        b_0, b_1, b_2, b_3 = _inputs(x_ptr, o_x, K, 2.0 ** (80 - 4 * HALF), 2.0 ** (72 - 4 * HALF))
        b_x_sum += ((b_0 + b_2) + (b_1 + b_3) * 256.0) * 2.0 ** (4 * HALF - 149)
        MASK: tl.constexpr = 0xFF if KIND == "int8" else 0xF << 4 * HALF
        b_high = b_word >> 16
        b_sum += _float(b_word & MASK) * b_0[None, :]
        b_sum += _float(b_word & (MASK << 8)) * b_1[None, :]
        b_sum += _float(b_high & MASK) * b_2[None, :]
        b_sum += _float(b_high & (MASK << 8)) * b_3[None, :]
    else:
        b_0, b_1, b_2, b_3 = _inputs(x_ptr, o_x, K, 2.0**60, 2.0**60)
        LEFT: tl.constexpr = 4 * (1 - HALF) if KIND == "e2m1" else 0
        b_sum += _narrow_float(b_word << (24 + LEFT), KIND) * b_0[None, :]
        b_sum += _narrow_float(b_word << (16 + LEFT), KIND) * b_1[None, :]
        b_sum += _narrow_float(b_word << (8 + LEFT), KIND) * b_2[None, :]
        b_sum += _narrow_float(b_word << LEFT, KIND) * b_3[None, :]
    return b_sum, b_x_sum


@triton.jit
def _inputs(x_ptr, o_x, K: tl.constexpr, EVEN: tl.constexpr, ODD: tl.constexpr):
    """Return the four inputs from `o_x` on, times EVEN, ODD, EVEN and ODD, in float32."""
    # As integers of 64 bits, which have all four.
    o_four = tl.max_contiguous(tl.multiple_of(o_x // 4, 2), 2)
    b_four = tl.load(x_ptr.to(tl.pointer_type(tl.int64)) + o_four, mask=o_x < K, other=0)
    b_0, b_1 = _pair(b_four.to(tl.int32), x_ptr.dtype.element_ty)
    b_2, b_3 = _pair((b_four >> 32).to(tl.int32), x_ptr.dtype.element_ty)
    return b_0 * EVEN, b_1 * ODD, b_2 * EVEN, b_3 * ODD


@triton.jit
def _pair(b_pair, DTYPE: tl.constexpr):
    """Return two 16-bit floats in float32."""
    if DTYPE.is_bf16():
        b_even, b_odd = _float(b_pair << 16), _float(b_pair & -0x10000)
    else:
        b_even = b_pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        b_odd = (b_pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return b_even, b_odd


@triton.jit
def _narrow_float(b_bits, KIND: tl.constexpr):
    """Return the float that int32 begin with: E2M1 times 2^-126, or E4M3 times 2^-120."""
    if KIND == "e2m1":
        b_value = _float((b_bits >> 6) & -0x7E400000)  # 0x81C00000
    else:
        b_value = _float((b_bits >> 4) & -0x78100000)  # 0x87F00000
    return b_value


@triton.jit
def _float(b_bits):
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def _middle(shift_ptr, o_s, m_s, KIND: tl.constexpr):
    """Return the code that stands for zero, in float32: the middle one less the shift."""
    MIDDLE: tl.constexpr = 8 if KIND == "int4" else 128
    if shift_ptr is None:
        b_middle = tl.full(o_s.shape, MIDDLE, tl.float32)
    else:
        b_shift = tl.load(shift_ptr + o_s, mask=m_s, other=0)
        if b_shift.dtype == tl.int8:
            # As the last bits of a float, which takes less time than a conversion.
            b_middle = _float(MIDDLE + 0x4B400000 - b_shift.to(tl.int32)) - 12582912.0
        else:
            b_middle = MIDDLE - b_shift.to(tl.float32)
    return b_middle
