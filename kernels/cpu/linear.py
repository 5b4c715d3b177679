"""GEMMs with packed weights, in floating point, int8, or integers scaled in groups.

Weights are packed into panels of output channels in the order in which the kernels read them. A
panel has as many channels as two vector registers hold: 32 with AVX-512, 16 with AVX2.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_stride,
    check_shape,
)
from kernels.cpu.activation import ACTIVATIONS, Activation
from kernels.cpu.library import operations

GROUP = 32  # inputs that are quantised together for weights in groups
_UNIT_BYTES = 4  # multiplied at once by one instruction, along K


def runs(weight: Tensor, device: torch.device) -> bool:
    """Return whether `linear` can multiply with `weight` [N, K] on `device`.

    Requires the kernels. The weight, on any device, must be float, its K a multiple of 4.
    """
    if weight.dtype not in FLOATS or weight.shape[1] % _UNIT_BYTES:
        return False
    return operations(torch.empty(0, device=device)) is not None


def serves(weight: Tensor, device: torch.device) -> bool:
    """Return whether `linear` is the fastest available product on `device` for `weight` [N, K].

    In float32, oneDNN's products are faster.
    """
    return weight.dtype != torch.float32 and runs(weight, device)


@cache
def packed_columns() -> int:
    """Return C, the output channels that are packed together; the kernels must be built."""
    fast = operations(torch.empty(0))
    assert fast is not None, "the CPU kernels are not there"
    columns: int = fast.panel_columns()
    return columns


def can_gate(size: int) -> bool:
    """Return whether `gated_linear` supports `size` gates."""
    return size % (packed_columns() // 2) == 0


def pack(weight: Tensor) -> Tensor:
    """Return `weight` [N, K] as panels [P, K / n, C, n], padded with zero channels.

    n is 1 for float32 and 2 for the others.
    """
    return _pack(weight, _UNIT_BYTES // weight.itemsize)


def pack_int8(steps: Tensor) -> Tensor:
    """Return int8 `steps` [N, K] as panels [P, K / 4, C, 4] of uint8 with zero point 128."""
    # Flipping the sign bit adds 128.
    return _pack(steps.view(torch.uint8).bitwise_xor(128), 4)


def pack_int4(steps: Tensor) -> Tensor:
    """Return `steps` [N, K] of 0 to 15, uint8, as panels [P, K / 8, C, 4] of uint8.

    A byte has the step of an input in its low bits, and that of the fourth input after in its high.
    """
    low, high = steps.unflatten(1, (-1, 2, 4)).unbind(2)
    return _pack((low | high << 4).flatten(1), 4)


def pack_uint8(steps: Tensor) -> Tensor:
    """Return `steps` [N, K], uint8, as panels [P, K / 4, C, 4] of uint8."""
    return _pack(steps, 4)


def pad_groups(values: Tensor) -> Tensor:
    """Return [N, groups] values as float16 [P, groups, C], padded with zeros."""
    padded = F.pad(values.to(torch.float16), (0, 0, 0, -len(values) % packed_columns()))
    packed: Tensor = padded.unflatten(0, (-1, packed_columns())).transpose(1, 2).contiguous()
    return packed


def pad_channels(values: Tensor) -> Tensor:
    """Return [N] values padded with zeros for the channels that packing adds."""
    return F.pad(values, (0, -len(values) % packed_columns()))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    out_features: int,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    wide: bool = False,
    invariant: bool = False,
) -> Tensor:
    """Return `x` W^T + bias, rounded once.

    Products are summed in float32, in the order of K: a row's result does not depend on the others
    or on the threads. For int8 weights the rows of `x` are quantised first, symmetrically to 127
    steps of their largest magnitude, and summed exactly. For weights in groups `GROUP` values of a
    row are, each for themselves; the sums are added in float32. With AMX, many rows of bfloat16 are
    multiplied as they are with the weights rounded to bfloat16, unless `invariant`.

    Args:
        x: float [..., K], rows contiguous.
        weight: W, of the dtype of `x`, as `pack` returns it, or as one of the others does.
        bias: [N] of the dtype of `x`, or None.
        out_features: N.
        scale: float32 [P * C], the per-channel scales of int8 weights; or float16 [P, groups, C],
            of which each is for K / groups inputs, a multiple of `GROUP`, of what `pack_int4` or
            `pack_uint8` has packed.
        offset: float16 [P, groups, C], added to the weights of a group; without it 8 stands for 0
            in 4 bits, 128 in 8.
        wide: return float32.
        invariant: a row's result does not depend on the number of rows either.

    Returns:
        [..., N], contiguous, in the dtype of `x` unless `wide`. With int8 weights, rows with a
        value that is not finite are NaN.

    Raises:
        ValueError: an argument has a wrong shape, dtype or stride.
    """
    fast = _operations(x, weight, scale, offset, bias, out_features)
    out: Tensor = fast.linear(x, weight, scale, offset, bias, out_features, wide, invariant)
    return out


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    size: int,
    activation: Activation,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    """Return `activation(gate) * up`, [..., `size`], of the product that `linear` returns.

    Args:
        x: as in `linear`.
        weight, bias, scale, offset: as in `linear`, of 2 `size` channels in the order of
            `interleave`.
        size: number of gates; `can_gate` must hold.
        activation: applied to the gates.
        invariant: as in `linear`.

    Raises:
        ValueError: as in `linear`.
    """
    if not can_gate(size):
        raise ValueError(f"size: must be a multiple of {packed_columns() // 2} (got {size})")
    fast = _operations(x, weight, scale, offset, bias, 2 * size)
    out: Tensor = fast.gated_linear(
        x, weight, scale, offset, bias, size, ACTIVATIONS[activation], invariant
    )
    return out


def interleave(stacked: Tensor) -> Tensor:
    """Return [2 N, ...] with the first half of the rows, the gates, interleaved with the second.

    Rows alternate in runs of half a panel.
    """
    turns: Tensor = stacked.unflatten(0, (2, -1, packed_columns() // 2)).transpose(0, 1)
    return turns.flatten(0, 2)


def _pack(weight: Tensor, per_unit: int) -> Tensor:
    columns = packed_columns()
    if added := -len(weight) % columns:
        weight = F.pad(weight, (0, 0, 0, added))
    # Move whole units, so that fewer and larger pieces are copied.
    units = weight.contiguous().view(torch.int32)
    packed: Tensor = units.unflatten(0, (-1, columns)).transpose(1, 2).contiguous()
    num_panels, depth, _ = packed.shape
    return packed.view(weight.dtype).view(num_panels, depth, columns, per_unit)


def _operations(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    bias: Tensor | None,
    out_features: int,
) -> Any:
    """Check these arguments of `linear` and return the operators to use."""
    check_dtype("x", x, *FLOATS)
    check_last_stride("x", x)
    dtype = x.dtype if scale is None else torch.uint8
    check_dtype("weight", weight, dtype)
    in_features, columns = x.shape[-1], packed_columns()
    num_panels = -(-out_features // columns)
    per_unit = _UNIT_BYTES // dtype.itemsize
    if scale is not None and scale.dim() == 3 and 8 * weight.shape[1] == in_features:
        per_unit = 8
    if in_features % per_unit:
        raise ValueError(f"x: its last dimension must be a multiple of {per_unit}")
    units = (num_panels, in_features // per_unit, columns, _UNIT_BYTES // dtype.itemsize)
    check_shape("weight", weight, units)
    check_contiguous("weight", weight)
    if scale is not None:
        shape: tuple[int, ...] = (num_panels * columns,)
        if scale.dim() == 3:
            num_groups = scale.shape[1]
            if num_groups == 0 or in_features % (num_groups * GROUP):
                raise ValueError(
                    f"scale: must have groups of a multiple of {GROUP} inputs (got {num_groups} "
                    f"groups of {in_features} inputs in all)"
                )
            shape = (num_panels, num_groups, columns)
        check_dtype("scale", scale, torch.float32 if scale.dim() == 1 else torch.float16)
        check_shape("scale", scale, shape)
        check_contiguous("scale", scale)
    if offset is not None:
        if scale is None or scale.dim() != 3:
            raise ValueError("offset: needs scales of groups")
        check_dtype("offset", offset, torch.float16)
        check_shape("offset", offset, tuple(scale.shape))
        check_contiguous("offset", offset)
    if bias is not None:
        check_dtype("bias", bias, x.dtype)
        check_shape("bias", bias, (out_features,))
        check_contiguous("bias", bias)
    named = {"weight": weight, "scale": scale, "offset": offset, "bias": bias}
    for name, tensor in named.items():
        if tensor is not None:
            check_device(name, tensor, x.device)
    fast = operations(x)
    assert fast is not None, "the CPU kernels are not there"
    return fast
