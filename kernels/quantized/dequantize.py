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
from kernels.quantized.codes import Codes, expert, unpack
from kernels.quantized.widen import widen_e2m1
from kernels.quantized.wna16_sum import scale_of


def dequantize(weight: Codes, dtype: torch.dtype, *, halves: bool = False) -> Tensor:
    """Return the weight [N, K], computed in float32 and rounded once to `dtype`.

    Args:
        weight: or those of several experts: then [E, N, K].
        halves: write the rows of the first half to the even ones, the others to the odd ones, as
            products of experts take gates and ups.
    """
    *experts, num_rows, num_bytes = weight.packed.shape
    if not device.runs_triton(weight.packed):
        return _torch(weight, dtype, halves=halves)
    shape = (*experts, num_rows, weight.depth)
    out = torch.empty(shape, dtype=dtype, device=weight.packed.device)
    tile = settings(weight.depth)
    constants = weight.constants(num_rows)
    del constants["NATIVE"]
    _kernel[(out.numel() // weight.depth, cdiv(weight.depth, tile["BLOCK"]))](
        out_ptr=out,
        row_bytes=num_bytes,
        INTERLEAVED=halves,
        **weight.pointers(),
        **constants,
        **tile,
    )
    return out


def _torch(weight: Codes, dtype: torch.dtype, *, halves: bool) -> Tensor:
    if weight.packed.dim() == 2:
        rows = unpack(weight).to(dtype)
        return torch.stack(rows.chunk(2), 1).flatten(0, 1) if halves else rows
    each = (expert(weight, i) for i in range(len(weight.packed)))
    return torch.stack([_torch(one, dtype, halves=halves) for one in each])


@triton.jit
def _kernel(
    packed_ptr,
    scale_ptr,
    shift_ptr,
    table_ptr,
    factor_ptr,
    out_ptr,
    row_bytes,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    HALVES: tl.constexpr,
    RUN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
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
    if INTERLEAVED:
        i_its = i_row % N  # of its expert
        i_row += 2 * (i_its % (N // 2)) + i_its // (N // 2) - i_its
    tl.store(out_ptr + i_row * K + o_k, b_value.to(out_ptr.dtype.element_ty), mask=m)


def settings(depth: int) -> dict[str, int]:
    """Return tile size and warps for rows of `depth`: 16 values per thread."""
    block = min(next_power_of_2(depth), 4096)
    return {"BLOCK": block, "num_warps": max(block // 512, 1)}
