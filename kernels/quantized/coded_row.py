"""Product of one row with a weight of codes of 4 or 8 bits, without matrix instructions.

A step of one sequence is bound by reading the weights. A program of `coded_product` waits in turn
for each block of codes, shifts and scales, and takes 5 instructions per weight of 4 bits: more than
there is time for. One of this kernel computes 8 outputs over the whole depth, in 3 to 5 of them
per weight, and no second launch adds parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dependent_launch, device
from kernels.device import cdiv
from kernels.quantized.coded_row_kernel import row_kernel
from kernels.quantized.codes import Codes

_KINDS = ("int4", "int8", "e4m3", "e2m1")
_ALIGNMENT = 16  # bytes that are read at once, of x; the layout of codes has it


def takes(x: Tensor, weight: Codes) -> bool:
    """Return whether `coded_row` multiplies them."""
    return len(x) == 1 and weight.kind in _KINDS and _is_aligned(x, weight.packed)


def coded_row(x: Tensor, weight: Codes, bias: Tensor | None) -> Tensor:
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
