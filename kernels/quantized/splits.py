"""Split-K: splits of the depth of a GEMM, and the sum of their results.

A product of few rows is bound by reading its weight, and has few tiles: of a weight of 4096 columns
64. Several programs share a tile then, each with a part of the depth, and write their sums in
float32. A second kernel adds them, always in the same order, so that a result does not depend on
which program ends first. The number of parts is fixed by the weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import dependent_launch
from kernels.dependent_launch import start_next, wait
from kernels.device import cdiv

MOST_SPLIT = 64  # rows of a product whose depth is split
_MOST = 8
_FEWEST_BLOCKS = 4  # of a part: as many as are on the way at once
_BLOCK = 1024


class Splits(NamedTuple):
    """The depth in `num_parts` parts of `num_blocks` blocks, the last of which may have fewer."""

    num_parts: int
    num_blocks: int


def plan_splits(num_tiles: int, num_blocks: int, num_sms: int, per_sm: int = 2) -> Splits:
    """Return in how many parts `num_blocks` blocks are summed, for `per_sm` programs on each SM.

    Args:
        num_tiles: of the result.
    """
    count = max(1, min(per_sm * num_sms // num_tiles, num_blocks // _FEWEST_BLOCKS, _MOST))
    in_each = cdiv(num_blocks, count)
    return Splits(cdiv(num_blocks, in_each), in_each)


def sum_parts(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of `parts` in their order, plus `bias`, rounded once.

    Args:
        parts: float32 [P, M, N], contiguous.
        bias: [N], contiguous, or None.

    Returns:
        [M, N] in `dtype`, contiguous.
    """
    count, num_rows, num_columns = parts.shape
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=parts.device)
    _kernel[(cdiv(out.numel(), _BLOCK),)](
        parts_ptr=parts,
        bias_ptr=bias,
        out_ptr=out,
        size=out.numel(),
        N=num_columns,
        PARTS=count,
        BLOCK=_BLOCK,
        num_warps=4,
        **dependent_launch.options(parts.device),
    )
    return out


@triton.jit(do_not_specialize=["size"])
def _kernel(
    parts_ptr,
    bias_ptr,
    out_ptr,
    size,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait(DEPENDENT)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < size
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_part in tl.static_range(PARTS):
        b_sum += tl.load(parts_ptr + i_part * size + o, mask=m, other=0.0)
    if bias_ptr is not None:
        b_sum += tl.load(bias_ptr + o % N, mask=m, other=0.0).to(tl.float32)
    start_next(DEPENDENT)
    tl.store(out_ptr + o, b_sum.to(out_ptr.dtype.element_ty), mask=m)
