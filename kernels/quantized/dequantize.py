"""The weight that codes of 4 or 8 bits stand for, written out in 16-bit floats.

A product of many rows is bound by arithmetic, and cuBLAS's is twice as fast as one that widens the
weight in registers for each tile of rows. Each program writes a part of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.device import cdiv, next_power_of_2
from kernels.e4m3 import from_e4m3
from kernels.quantized.coded_sum import scale_of
from kernels.quantized.codes import Codes, unpack
from kernels.quantized.widen import widen_e2m1


def dequantize(weight: Codes, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K], computed in float32 and rounded once to `dtype`."""
    num_rows, depth = weight.num_columns, weight.depth
    if not device.runs_triton(weight.packed):
        return unpack(weight).to(dtype)
    out = torch.empty(num_rows, depth, dtype=dtype, device=weight.packed.device)
    tile = settings(depth)
    constants = weight.constants(num_rows)
    del constants["N"], constants["NATIVE"]
    _kernel[(num_rows, cdiv(depth, tile["BLOCK"]))](
        out_ptr=out,
        row_bytes=weight.packed.stride(0),
        **weight.pointers(),
        **constants,
        **tile,
    )
    return out


@triton.jit
def _kernel(
    packed_ptr,
    scale_ptr,
    shift_ptr,
    table_ptr,
    factor_ptr,
    out_ptr,
    row_bytes,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    HALVES: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o_k < K
    o_byte = o_k if HALVES == 1 else o_k // (2 * RUN) * RUN + o_k % RUN
    b_code = tl.load(packed_ptr + i_row * row_bytes + o_byte, mask=m, other=0)
    if HALVES == 2:
        b_code = (b_code >> (4 * (o_k // RUN % 2)).to(tl.uint8)) & 15
    if KIND == "e4m3":
        b_value = from_e4m3(b_code)
    elif KIND == "e2m1":
        b_value = widen_e2m1(b_code, 0, tl.float32, False)
    elif KIND == "table4":
        b_value = tl.load(table_ptr + b_code.to(tl.int32))
    else:
        b_value = b_code.to(tl.float32) - (8.0 if KIND == "int4" else 128.0)
    o_group = i_row // ROWS * (K // GROUP) + o_k // GROUP
    if shift_ptr is not None:
        b_value += tl.load(shift_ptr + o_group, mask=m, other=0).to(tl.float32)
    b_value *= scale_of(scale_ptr + o_group, m, SCALES)
    if factor_ptr is not None:
        b_value *= tl.load(factor_ptr + i_row)
    tl.store(out_ptr + i_row * K + o_k, b_value.to(out_ptr.dtype.element_ty), mask=m)


def settings(depth: int) -> dict[str, int]:
    """Return tile size and warps for rows of `depth`: 16 values per thread."""
    block = min(next_power_of_2(depth), 4096)
    return {"BLOCK": block, "num_warps": max(block // 512, 1)}
