"""Sums of products with codes of 4 or 8 bits, for the kernels of dense weights and of experts."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.e4m3 import from_e4m3
from kernels.quantized.widen import widen_e2m1, widen_e4m3, widen_int4


@triton.jit
def add_block(
    b_sum,
    b_code,
    p_x,
    m_m,
    m_n,
    i_k,
    scale_ptr,
    shift_ptr,
    table_ptr,
    o_scale,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    HALVES: tl.constexpr,
    RUN: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return `b_sum` [N, M] + W x^T of a block of HALVES * RUN inputs.

    Args:
        b_code: uint8 [N, RUN].
        p_x: [M, RUN], where x begins, 16-bit floats.
        m_m, m_n: [M] and [N], the rows that there are.
        i_k: the first input of the block.
        o_scale: [N], where the scales of rows begin; those of all inputs are for `scaled_sum`.
    """
    o_k = tl.arange(0, RUN)
    for i_half in tl.static_range(HALVES):
        i_run = i_k + i_half * RUN
        m_x, m_scale = m_m[:, None], m_n
        if K % (HALVES * RUN):
            m_x = m_x & (i_run + o_k < K)[None, :]
            m_scale = m_scale & (tl.full([b_code.shape[0]], i_run, tl.int32) < K)
        b_x = tl.load(p_x + i_run, mask=m_x, other=0.0)
        o_group = o_scale + i_run // GROUP
        b_shift = tl.zeros([b_code.shape[0]], tl.float32)
        if shift_ptr is not None:
            b_shift = tl.load(shift_ptr + o_group, mask=m_scale, other=0).to(tl.float32)
        b_w = _widen(b_code, b_shift, shift_ptr, table_ptr, KIND, i_half, b_x.dtype, NATIVE)
        if GROUP == K:
            b_sum = tl.dot(b_w, tl.trans(b_x), b_sum)
        else:
            b_scale = scale_of(scale_ptr + o_group, m_scale, SCALES)[:, None]
            # Those of few rows multiply sums, of which there are fewer than weights in a tile.
            if b_x.shape[0] <= 64:
                b_sum += tl.dot(b_w, tl.trans(b_x)) * b_scale
            else:
                b_w = (b_w.to(tl.float32) * b_scale).to(b_x.dtype)
                b_sum = tl.dot(b_w, tl.trans(b_x), b_sum)
    return b_sum


@triton.jit
def scaled_sum(
    b_sum,
    scale_ptr,
    factor_ptr,
    o_scale,
    o_n,
    m_n,
    SCALES: tl.constexpr,
    OF_ALL: tl.constexpr,
):
    """Return the sum [N, M] times the scale of all inputs and the factor of each row."""
    if OF_ALL:
        b_sum *= scale_of(scale_ptr + o_scale, m_n, SCALES)[:, None]
    if factor_ptr is not None:
        b_sum *= tl.load(factor_ptr + o_n, mask=m_n, other=0.0)[:, None]
    return b_sum


@triton.jit
def scale_of(p_scale, m_scale, SCALES: tl.constexpr):
    """Return scales in float32; those of 8 bits are bytes."""
    b_scale = tl.load(p_scale, mask=m_scale, other=0)
    if SCALES == "e4m3":
        b_scale = from_e4m3(b_scale)
    elif SCALES == "e8m0":
        b_scale = (b_scale.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    else:
        b_scale = b_scale.to(tl.float32)
    return b_scale


@triton.jit
def _widen(
    b_code,
    b_shift,
    shift_ptr,
    table_ptr,
    KIND: tl.constexpr,
    HALF: tl.constexpr,
    DTYPE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return the values of codes plus their shifts, in DTYPE."""
    IS_WHOLE: tl.constexpr = shift_ptr is None or shift_ptr.dtype.element_ty == tl.int8
    if KIND == "e4m3":
        b_w = widen_e4m3(b_code, DTYPE, NATIVE)
    elif KIND == "e2m1":
        b_w = widen_e2m1(b_code, HALF, DTYPE, NATIVE)
    elif KIND == "table4":
        b_w = tl.load(table_ptr + ((b_code >> 4 * HALF) & 15).to(tl.int32)).to(DTYPE)
    elif KIND == "int4" and IS_WHOLE:
        b_w = widen_int4(b_code, b_shift, HALF, DTYPE, NATIVE)
    else:
        if KIND == "int4":
            b_code = (b_code >> 4 * HALF) & 15
        # As the last bits of 2^15, which additions take away faster than integers are converted.
        CENTRE: tl.constexpr = 32776.0 if KIND == "int4" else 32896.0
        b_w = ((b_code.to(tl.int32) << 8) | 0x47000000).to(tl.float32, bitcast=True)
        b_w = (b_w - (CENTRE - b_shift)[:, None]).to(DTYPE)
    return b_w
