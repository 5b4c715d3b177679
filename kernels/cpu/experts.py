"""Mixture of experts on the CPU, with packed weights: only those of chosen experts are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_stride,
    check_shape,
)
from kernels.cpu.activation import ACTIVATIONS
from kernels.cpu.library import operations
from kernels.cpu.linear import can_gate, packed_columns
from kernels.experts.activation import ExpertActivation

_UNIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class PackedExpertWeights:
    """A projection of all experts.

    Attributes:
        weight: [E, ...], of each expert what `kernels.cpu.linear.pack` or `pack_int8` returns.
        scale: float32 [E, P * C], the per-channel scales of int8 weights, otherwise None.
        bias: [E, N] of the dtype of the activations, or None.
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None


def packed_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    totals: Tensor,
    gate_up: PackedExpertWeights,
    down: PackedExpertWeights,
    *,
    size: int,
    activation: ExpertActivation,
) -> Tensor:
    """Return the sum of each token's chosen experts, weighted; the number of choices is counted.

    Products are those of `kernels.cpu.linear`; between them, and before the sum, they are rounded
    to the dtype of `x`. A token's result does not depend on the others, to the last bit.

    Args:
        x: float [T, H], rows contiguous.
        experts: int32 [T, K], contiguous, -1 for none: each token's experts, which differ.
        weights: float32 [T, K], contiguous.
        totals: int64 [E], contiguous, to which the number of each expert's choices is added.
        gate_up: gates and ups alternate by half a panel, as `kernels.cpu.linear.interleave` does.
        down: of `size` inputs.
        size: number of gates; `kernels.cpu.linear.can_gate` must hold.
        activation: of gates and ups.

    Returns:
        [T, H] in the dtype of `x`, contiguous.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride, device or value.
    """
    _check(x, experts, weights, totals)
    if not can_gate(size):
        raise ValueError(f"size: must be a multiple of {packed_columns() // 2} (got {size})")
    num_experts, hidden = len(totals), x.shape[1]
    _check_packed("gate_up", gate_up, x, num_experts, 2 * size, hidden)
    _check_packed("down", down, x, num_experts, hidden, size)
    fast = operations(x)
    assert fast is not None, "the CPU kernels are not there"
    out: Tensor = fast.experts(
        x,
        experts,
        weights,
        totals,
        gate_up.weight,
        gate_up.scale,
        gate_up.bias,
        down.weight,
        down.scale,
        down.bias,
        size,
        ACTIVATIONS[activation.kind],
        activation.alpha,
        activation.limit,
        activation.offset,
    )
    return out


def _check(x: Tensor, experts: Tensor, weights: Tensor, totals: Tensor) -> None:
    check_dtype("x", x, *FLOATS)
    check_shape("x", x, (None, None))
    check_last_stride("x", x)
    check_dtype("experts", experts, torch.int32)
    check_shape("experts", experts, (len(x), None))
    check_dtype("weights", weights, torch.float32)
    check_shape("weights", weights, tuple(experts.shape))
    check_dtype("totals", totals, torch.int64)
    check_shape("totals", totals, (None,))
    for name, tensor in (("experts", experts), ("weights", weights), ("totals", totals)):
        check_contiguous(name, tensor)
        check_device(name, tensor, x.device)
    if experts.numel() and not -1 <= int(experts.min()) <= int(experts.max()) < len(totals):
        raise ValueError(f"experts: must be from -1 to {len(totals) - 1}")


def _check_packed(
    name: str, packed: PackedExpertWeights, x: Tensor, num_experts: int, rows: int, depth: int
) -> None:
    """Check a projection to `rows` features from `depth`."""
    dtype = x.dtype if packed.scale is None else torch.uint8
    check_dtype(name, packed.weight, dtype)
    columns, per_unit = packed_columns(), _UNIT_BYTES // dtype.itemsize
    num_panels = -(-rows // columns)
    check_shape(
        name, packed.weight, (num_experts, num_panels, depth // per_unit, columns, per_unit)
    )
    named = {name: packed.weight, f"{name}.scale": packed.scale, f"{name}.bias": packed.bias}
    if packed.scale is not None:
        check_dtype(f"{name}.scale", packed.scale, torch.float32)
        check_shape(f"{name}.scale", packed.scale, (num_experts, num_panels * columns))
    if packed.bias is not None:
        check_dtype(f"{name}.bias", packed.bias, x.dtype)
        check_shape(f"{name}.bias", packed.bias, (num_experts, rows))
    for part, tensor in named.items():
        if tensor is not None:
            check_contiguous(part, tensor)
            check_device(part, tensor, x.device)
