"""Weighted sum of the results of each token's experts, in the order in which they were chosen.

One program computes one tile of a token's row. Summed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_shape,
)
from kernels.device import cdiv, next_power_of_2


def combine(results: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over k of `weights[t, k] * results[t, k]`, if `experts[t, k]` is one.

    Args:
        results: float [T * K, N], contiguous. Those without an expert are not read.
        experts: int32 [T, K], contiguous; -1 for none, as of padding and another rank's.
        weights: float32 [T, K], contiguous.

    Returns:
        [T, N] in the dtype of `results`, contiguous.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(results, experts, weights)
    if not device.runs_triton(results):
        return reference(results, experts, weights).to(results.dtype)
    num_tokens, top_k = experts.shape
    size = results.shape[1]
    out = torch.empty(num_tokens, size, dtype=results.dtype, device=results.device)
    if out.numel():
        tile = settings(size)
        _kernel[(num_tokens * cdiv(size, tile["BLOCK"]),)](
            results_ptr=results,
            experts_ptr=experts,
            weights_ptr=weights,
            out_ptr=out,
            SIZE=size,
            TOP=top_k,
            **tile,
        )
    return out


def reference(results: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the sum in float32."""
    each = results.float().unflatten(0, experts.shape).masked_fill((experts < 0)[..., None], 0.0)
    total = torch.zeros_like(each[:, 0])
    for k in range(experts.shape[1]):
        total += weights[:, k, None] * each[:, k]
    return total


@triton.jit
def _kernel(
    results_ptr,
    experts_ptr,
    weights_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    TILES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    i_t = (tl.program_id(0) // TILES).to(tl.int64)
    o = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    b_sum = tl.zeros([BLOCK], tl.float32)
    for k in range(TOP):
        i = i_t * TOP + k
        if tl.load(experts_ptr + i) >= 0:
            b_result = tl.load(results_ptr + i * SIZE + o, mask=m, other=0.0).to(tl.float32)
            b_sum += tl.load(weights_ptr + i) * b_result
    tl.store(out_ptr + i_t * SIZE + o, b_sum.to(out_ptr.dtype.element_ty), mask=m)


def settings(size: int) -> dict[str, int]:
    """Return tile size and warps: 8 values per thread, one vectorised load of each result."""
    block = min(next_power_of_2(size), 1024)
    return {"BLOCK": block, "num_warps": max(block // 256, 1)}


def _check(results: Tensor, experts: Tensor, weights: Tensor) -> None:
    check_dtype("results", results, *FLOATS)
    check_shape("experts", experts, (None, None))
    check_shape("results", results, (experts.numel(), None))
    check_contiguous("results", results)
    check_dtype("experts", experts, torch.int32)
    check_dtype("weights", weights, torch.float32)
    check_shape("weights", weights, tuple(experts.shape))
    for name, tensor in (("experts", experts), ("weights", weights)):
        check_device(name, tensor, results.device)
        check_contiguous(name, tensor)
