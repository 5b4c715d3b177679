"""Sums of products with codes of 4 or 8 bits, for the kernels of dense weights and of experts."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.e4m3 import from_e4m3
from kernels.quantized.widen import widen_e2m1, widen_e4m3, widen_int4, widen_int4_words


@triton.jit
def load_scales(
    i_k,
    m_n,
    scale_ptr,
    shift_ptr,
    o_scale,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    HALVES: tl.constexpr,
    RUN: tl.constexpr,
):
    """Return the scales and shifts [N] in float32 of the block of HALVES * RUN inputs from `i_k`.

    To be called a block ahead, since they come from memory while it waits. Scales of all inputs are
    for `scaled_sum`.

    Returns:
        Scales and shifts of the first run, and of the last one, for `add_block`.
    """
    b_scale, b_shift = _scales_at(i_k, m_n, scale_ptr, shift_ptr, o_scale, K, GROUP, SCALES)
    b_last_scale, b_last_shift = b_scale, b_shift
    if GROUP % (HALVES * RUN):
        b_last_scale, b_last_shift = _scales_at(
            i_k + (HALVES - 1) * RUN, m_n, scale_ptr, shift_ptr, o_scale, K, GROUP, SCALES
        )
    return b_scale, b_shift, b_last_scale, b_last_shift


@triton.jit
def _scales_at(
    i_k,
    m_n,
    scale_ptr,
    shift_ptr,
    o_scale,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
):
    # Those of all inputs are of any block, also behind the last one.
    o_group = o_scale + (0 if GROUP == K else i_k // GROUP)
    m = m_n if GROUP == K else m_n & (tl.full(m_n.shape, i_k, tl.int32) < K)
    b_scale = tl.full(m_n.shape, 1.0, tl.float32)
    if GROUP != K:
        b_scale = scale_of(scale_ptr + o_group, m, SCALES)
    b_shift = tl.zeros(m_n.shape, tl.float32)
    if shift_ptr is not None:
        b_shift = tl.load(shift_ptr + o_group, mask=m, other=0).to(tl.float32)
    return b_scale, b_shift


@triton.jit
def add_block(
    b_sum,
    b_code,
    p_x,
    m_m,
    i_k,
    scales,
    shift_ptr,
    table_ptr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    HALVES: tl.constexpr,
    RUN: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return `b_sum` [N, M] + W x^T of a block of HALVES * RUN inputs.

    Args:
        b_code: uint8 [N, RUN]; or, of `int4` with shifts that are integers, int16 [N, RUN / 2].
        p_x: [M, RUN], where x begins, 16-bit floats.
        m_m: [M], the rows that there are.
        i_k: the first input of the block.
        scales: as `load_scales` returns them.
    """
    b_scale, b_shift, b_last_scale, b_last_shift = scales
    SCALED: tl.constexpr = GROUP != K
    WHOLE: tl.constexpr = GROUP % (HALVES * RUN) == 0
    # Scales of few rows multiply sums, of which there are fewer than weights in a tile.
    OF_SUMS: tl.constexpr = SCALED and p_x.shape[0] <= 64
    o_k = tl.arange(0, RUN)
    b_part = tl.zeros_like(b_sum) if OF_SUMS else b_sum
    for i_half in tl.static_range(HALVES):
        i_run = i_k + i_half * RUN
        m_x = m_m[:, None]
        if K % (HALVES * RUN):
            m_x = m_x & (i_run + o_k < K)[None, :]
        b_x = tl.load(p_x + i_run, mask=m_x, other=0.0)
        b_its_scale, b_its_shift = b_scale, b_shift
        if i_half > 0:
            b_its_scale, b_its_shift = b_last_scale, b_last_shift
        if b_code.dtype == tl.int16:
            b_even, b_odd = tl.split(tl.reshape(b_x, [p_x.shape[0], RUN // 2, 2]))
            b_w = widen_int4_words(b_code, b_its_shift, i_half, b_x.dtype, NATIVE)
            b_part = tl.dot(b_w, tl.trans(b_even), b_part)
            b_w = widen_int4_words(b_code, b_its_shift, i_half + 2, b_x.dtype, NATIVE)
            b_part = tl.dot(b_w, tl.trans(b_odd), b_part)
        else:
            b_w = _widen(b_code, b_its_shift, shift_ptr, table_ptr, KIND, i_half, b_x.dtype, NATIVE)
            if SCALED and not OF_SUMS:
                b_w = (b_w.to(tl.float32) * b_its_scale[:, None]).to(b_x.dtype)
            b_part = tl.dot(b_w, tl.trans(b_x), b_part)
        if OF_SUMS and (not WHOLE or i_half == HALVES - 1):
            b_sum += b_part * b_its_scale[:, None]
            b_part = tl.zeros_like(b_sum)
    return b_sum if OF_SUMS else b_part


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
