"""Mixture of experts on the CPU, with packed weights: only those of chosen experts are read."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import check_contiguous, check_dtype, check_shape
from kernels.cpu.activation import ACTIVATIONS, Activation
from kernels.cpu.library import operations
from kernels.cpu.linear import can_gate, panel_columns


def experts_in_panels(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    *,
    size: int,
    activation: Activation,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> Tensor:
    """Return the sum of each token's chosen experts, weighted; summed in float32, rounded once.

    A token's result does not depend on the others, to the last bit.

    Args:
        x: bfloat16 or float32 [T, H].
        gate_up: [E, ...], of each expert what `kernels.cpu.linear.pack` or `pack_int8` returns for
            its gates and the rest, in the order of `kernels.cpu.linear.interleave`.
        down: [E, ...], likewise.
        expert_ids: int64 [T, top_k], contiguous: each token's experts, which differ.
        weights: float32 [T, top_k], contiguous.
        size: number of gates; `kernels.cpu.linear.can_gate` must hold.
        activation: of the gates.
        gate_up_scale, down_scale: float32 [E, P * C], the per-channel scales of int8 weights.

    Returns:
        [T, H] in the dtype of `x`.

    Raises:
        ValueError: an argument has a wrong shape, dtype or stride.
    """
    check_dtype("x", x, torch.bfloat16, torch.float32)
    check_shape("x", x, (None, None))
    num_experts, hidden, columns = len(gate_up), x.shape[1], panel_columns()
    if not can_gate(size):
        raise ValueError(f"size: must be a multiple of {columns // 2} (got {size})")
    for name, panels, scale, rows, depth in (
        ("gate_up", gate_up, gate_up_scale, 2 * size, hidden),
        ("down", down, down_scale, hidden, size),
    ):
        dtype = x.dtype if scale is None else torch.uint8
        check_dtype(name, panels, dtype)
        per_unit, num_panels = 4 // dtype.itemsize, -(-rows // columns)
        check_shape(name, panels, (num_experts, num_panels, depth // per_unit, columns, per_unit))
        check_contiguous(name, panels)
        if scale is not None:
            check_dtype(f"{name}_scale", scale, torch.float32)
            check_shape(f"{name}_scale", scale, (num_experts, num_panels * columns))
            check_contiguous(f"{name}_scale", scale)
    check_dtype("expert_ids", expert_ids, torch.int64)
    check_shape("expert_ids", expert_ids, (len(x), None))
    check_dtype("weights", weights, torch.float32)
    check_shape("weights", weights, tuple(expert_ids.shape))
    check_contiguous("expert_ids", expert_ids)
    check_contiguous("weights", weights)
    if expert_ids.numel() and not 0 <= int(expert_ids.min()) <= int(expert_ids.max()) < num_experts:
        raise ValueError(f"expert_ids: must be below {num_experts}")
    fast = operations(x)
    assert fast is not None, "the CPU kernels are not there"
    out: Tensor = fast.experts(
        x, gate_up, gate_up_scale, down, down_scale, expert_ids, weights, size,
        ACTIVATIONS[activation],
    )  # fmt: skip
    return out
