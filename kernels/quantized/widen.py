"""Widening of codes in registers, to the type that is multiplied.

A tile has a code in each byte, or two of 4 bits. Triton would widen byte by byte, which takes more
instructions than there is time for while the next tile comes from memory: 7 for a code of 4 bits,
where pairs of 16-bit floats take 1.4. Loaded as words of 16 bits, the codes of one index in two of
them are such a pair where they lie, and no bytes are exchanged. The interpreter, which runs no
assembly, widens to float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.e4m3 import from_e4m3

# Four bytes become the low halves of 16-bit floats of 128 or 1024 whose last bits are units; then
# what is more than the code's value is subtracted, exactly.
_INTEGERS = """
{{
.reg .b32 codes, low, high, one, unit;
{extract}
mov.b32 unit, {unit};
mov.b32 one, {one};
prmt.b32 low, codes, unit, 0x5140;
prmt.b32 high, codes, unit, 0x7362;
fma.rn.{kind} $0, low, one, $3;
fma.rn.{kind} $1, high, one, $4;
}}
"""
_LOW = "and.b32 codes, $2, 0x0F0F0F0F;"
_HIGH = "shr.b32 codes, $2, 4; and.b32 codes, codes, 0x0F0F0F0F;"
_BF16 = {"kind": "bf16x2", "unit": "0x43434343", "one": "0x3F803F80"}
_FP16 = {"kind": "f16x2", "unit": "0x64646464", "one": "0x3C003C00"}
_BF16_LOW = tl.constexpr(_INTEGERS.format(extract=_LOW, **_BF16))
_BF16_HIGH = tl.constexpr(_INTEGERS.format(extract=_HIGH, **_BF16))
_FP16_LOW = tl.constexpr(_INTEGERS.format(extract=_LOW, **_FP16))
_FP16_HIGH = tl.constexpr(_INTEGERS.format(extract=_HIGH, **_FP16))

# Sign, exponent and fraction of E4M3 or E2M1 are shifted into the fields of a 16-bit float, whose
# exponent, read with another bias, is then corrected.
_FLOATS = """
{{
.reg .b32 codes, low, high, sign, power, none;
mov.b32 power, {power};
mov.b32 none, 0x80008000;
shl.b32 codes, $2, {left};
prmt.b32 low, codes, 0, 0x1404;
prmt.b32 high, codes, 0, 0x3424;
and.b32 sign, low, 0x80008000;
shr.b32 low, low, {shift};
and.b32 low, low, {fields};
or.b32 low, low, sign;
fma.rn.{kind} $0, low, power, none;
and.b32 sign, high, 0x80008000;
shr.b32 high, high, {shift};
and.b32 high, high, {fields};
or.b32 high, high, sign;
fma.rn.{kind} $1, high, power, none;
}}
"""
_BF16_E4M3 = {"kind": "bf16x2", "shift": 4, "fields": "0x07F007F0", "power": "0x7B807B80"}  # 2^120
_FP16_E4M3 = {"kind": "f16x2", "shift": 1, "fields": "0x3F803F80", "power": "0x5C005C00"}  # 2^8
_BF16_E2M1 = {"kind": "bf16x2", "shift": 6, "fields": "0x01C001C0", "power": "0x7E807E80"}  # 2^126
_FP16_E2M1 = {"kind": "f16x2", "shift": 3, "fields": "0x0E000E00", "power": "0x74007400"}  # 2^14
_BF16_BYTES = tl.constexpr(_FLOATS.format(left=0, **_BF16_E4M3))
_FP16_BYTES = tl.constexpr(_FLOATS.format(left=0, **_FP16_E4M3))
_BF16_E2M1_LOW = tl.constexpr(_FLOATS.format(left=4, **_BF16_E2M1))
_BF16_E2M1_HIGH = tl.constexpr(_FLOATS.format(left=0, **_BF16_E2M1))
_FP16_E2M1_LOW = tl.constexpr(_FLOATS.format(left=4, **_FP16_E2M1))
_FP16_E2M1_HIGH = tl.constexpr(_FLOATS.format(left=0, **_FP16_E2M1))

# Of codes in two words, of one index. The last bits of floats of 128 or 1024 are units, as
# above.
_WORDS = """
{{
.reg .b32 codes, one;
shr.b32 codes, $1, {right};
and.b32 codes, codes, 0x000F000F;
or.b32 codes, codes, {unit};
mov.b32 one, {one};
fma.rn.{kind} $0, codes, one, $2;
}}
"""
_BF16_WORDS = tl.constexpr(
    [_WORDS.format(right=4 * index, **_BF16 | {"unit": "0x43004300"}) for index in range(4)]
)
_FP16_WORDS = tl.constexpr(
    [_WORDS.format(right=4 * index, **_FP16 | {"unit": "0x64006400"}) for index in range(4)]
)


@triton.jit
def widen_int4_words(
    b_word, b_shift, INDEX: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr
):
    """Return codes - 8 + shifts, which are integers of at most 64, in DTYPE.

    Args:
        b_word: int16 [N, K], four codes each, of which those at INDEX are widened, from the low
            bits on.
        b_shift: float32 [N].
    """
    if NATIVE:
        b_less = (b_shift - (136.0 if DTYPE.is_bf16() else 1032.0)).to(DTYPE)[:, None]
        b_value = tl.inline_asm_elementwise(
            _BF16_WORDS[INDEX] if DTYPE.is_bf16() else _FP16_WORDS[INDEX],
            "=r,r,r",
            [b_word, tl.broadcast_to(b_less, b_word.shape)],
            dtype=tl.bfloat16 if DTYPE.is_bf16() else tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        b_value = widen_int4((b_word >> 4 * INDEX).to(tl.uint8), b_shift, 0, DTYPE, False)
    return b_value


@triton.jit
def widen_int4(b_code, b_shift, HALF: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Return codes - 8 + shifts, which are integers of at most 64, in DTYPE.

    Args:
        b_code: uint8 [N, K], codes in the low bits if HALF is 0, in the high ones if it is 1.
        b_shift: float32 [N].
    """
    if NATIVE:
        b_less = (b_shift - (136.0 if DTYPE.is_bf16() else 1032.0)).to(DTYPE)[:, None]
        b_less = tl.broadcast_to(b_less, b_code.shape)
        if DTYPE.is_bf16():
            b_value = tl.inline_asm_elementwise(
                _BF16_HIGH if HALF else _BF16_LOW,
                "=r,=r,r,r,r",
                [b_code, b_less],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=4,
            )
        else:
            b_value = tl.inline_asm_elementwise(
                _FP16_HIGH if HALF else _FP16_LOW,
                "=r,=r,r,r,r",
                [b_code, b_less],
                dtype=tl.float16,
                is_pure=True,
                pack=4,
            )
    else:
        b_wide = ((b_code >> 4 * HALF) & 15).to(tl.float32)
        b_value = (b_wide - 8.0 + b_shift[:, None]).to(DTYPE)
    return b_value


@triton.jit
def widen_e4m3(b_code, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Return FP8, uint8 [N, K], in DTYPE, which is exact."""
    if NATIVE:
        if DTYPE.is_bf16():
            b_value = tl.inline_asm_elementwise(
                _BF16_BYTES, "=r,=r,r", [b_code], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            b_value = tl.inline_asm_elementwise(
                _FP16_BYTES, "=r,=r,r", [b_code], dtype=tl.float16, is_pure=True, pack=4
            )
    else:
        b_value = from_e4m3(b_code).to(DTYPE)
    return b_value


@triton.jit
def widen_e2m1(b_code, HALF: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Return floats of 4 bits in DTYPE, which is exact.

    Args:
        b_code: uint8 [N, K], floats in the low bits if HALF is 0, in the high ones if it is 1.
    """
    if NATIVE:
        if DTYPE.is_bf16():
            b_value = tl.inline_asm_elementwise(
                _BF16_E2M1_HIGH if HALF else _BF16_E2M1_LOW,
                "=r,=r,r",
                [b_code],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=4,
            )
        else:
            b_value = tl.inline_asm_elementwise(
                _FP16_E2M1_HIGH if HALF else _FP16_E2M1_LOW,
                "=r,=r,r",
                [b_code],
                dtype=tl.float16,
                is_pure=True,
                pack=4,
            )
    else:
        b_bits = ((b_code >> 4 * HALF) & 15).to(tl.uint32)
        b_bits = ((b_bits & 8) << 28) | ((b_bits & 7) << 22)
        b_value = (b_bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DTYPE)  # 2^126
    return b_value
