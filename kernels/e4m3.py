"""Conversion to and from FP8 (E4M3) in kernels, also where the GPU has no instruction for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@triton.jit
def to_e4m3(x, NATIVE: tl.constexpr):
    """Return the bits of float32 `x` as float8 e4m3: round to nearest even, saturate, keep NaN."""
    if NATIVE:
        b_code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        b_bits = x.to(tl.uint32, bitcast=True)
        b_size = tl.minimum(b_bits & 0x7FFFFFFF, 0x43E00000)  # at most 448
        # Exponent 127 becomes 7. Adds half of the last place, less one bit if that is even.
        b_normal = (b_size - (120 << 23) + 0x7FFFF + ((b_size >> 20) & 1)) >> 20
        # Below 2^-6 values are multiples of 2^-9, the last place of 2^14: the addition rounds.
        b_sum = b_size.to(tl.float32, bitcast=True) + 16384.0
        b_small = b_sum.to(tl.uint32, bitcast=True) & 0xFF
        b_code = tl.where(b_size < (121 << 23), b_small, b_normal)
        b_code = tl.where(x == x, b_code, 0x7F) | ((b_bits >> 24) & 0x80)
        b_code = b_code.to(tl.uint8)
    return b_code


@triton.jit
def from_e4m3(b_code):
    """Return float8 e4m3, as uint8, in float32; NaN becomes 480.

    Sign, exponent and fraction are shifted into float32's fields, and the exponent, which has
    bias 7, is read with bias 127: also of values below 2^-6, that are no normal numbers either.
    """
    b_bits = b_code.to(tl.uint32)
    b_bits = ((b_bits & 0x80) << 24) | ((b_bits & 0x7F) << 20)
    return b_bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
