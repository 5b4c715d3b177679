"""Weights of quantised checkpoints, as products on a GPU take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.layers.integer_weight import Int8Weight, IntegerWeight
from kernels.quantized.codes import BITS, Kind
from kernels.quantized.fp8_product import GROUP
from kernels.quantized.rows import quantize_rows

_HALF_BYTE = 128  # added to a signed byte makes it an unsigned one


class Fp8Weight(NamedTuple):
    """A weight [N, K] in FP8.

    Attributes:
        codes: float8_e4m3fn [N, K].
        scale: float32 [N, 1] of output channels; or [N / R, K / 128] of blocks of R of them.
        input_scale: float32 [1] of all activations; None: each token has its own.
    """

    codes: Tensor
    scale: Tensor
    input_scale: Tensor | None = None


class CodedWeight(NamedTuple):
    """A weight [N, K]: `steps` * `scale` + `offset`, as `kernels.quantized.codes.pack` takes it.

    Attributes:
        steps: uint8 [N, K].
        scale, offset: float32 [N, groups]; without offsets the middle of integers stands for 0.
        table: float32 [16], of the values that `steps` stand for.
        order: int64 [K], the input that each column multiplies; None: they are in order.
    """

    steps: Tensor
    kind: Kind
    scale: Tensor
    offset: Tensor | None = None
    table: Tensor | None = None
    order: Tensor | None = None


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """Return the nearest FP8 to `weight`, with a scale per output channel, on its device."""
    codes, scale = quantize_rows(weight)
    return Fp8Weight(codes, scale[:, None])


def of_blocks(codes: Tensor, scale: Tensor) -> Fp8Weight:
    """Return a weight with `scale` [N / 128, K / 128], both rounded up, of square blocks."""
    # As many output channels share a scale as divide N, so that parts can be stacked.
    rows = min(len(codes) & -len(codes), GROUP)
    of_rows = scale.repeat_interleave(GROUP // rows, 0)[: len(codes) // rows]
    return Fp8Weight(codes, of_rows.contiguous())


def of_integers(weight: IntegerWeight) -> CodedWeight:
    """Return the weight that integers stand for."""
    if isinstance(weight, Int8Weight):
        steps = (weight.steps.short() + _HALF_BYTE).to(torch.uint8)
        return CodedWeight(steps, "int8", weight.scale[:, None])
    kind: Kind = "int4" if weight.bits == 4 else "int8"
    return CodedWeight(weight.steps, kind, weight.scale, weight.offset)


def in_groups(
    steps: Tensor, scale: Tensor, offset: Tensor, bits: int, group_of: Tensor
) -> CodedWeight | None:
    """Return a weight whose groups are of any inputs; None: they are not equally large.

    Args:
        steps: uint8 [N, K].
        group_of: [K], the group of each input.
    """
    num_groups = scale.shape[1]
    size = len(group_of) // num_groups
    if not bool((torch.bincount(group_of.long(), minlength=num_groups) == size).all()):
        return None
    kind: Kind = "int4" if bits == 4 else "int8"
    order = torch.argsort(group_of, stable=True)
    if torch.equal(order, torch.arange(len(order), device=order.device)):
        return CodedWeight(steps, kind, scale, offset)
    return CodedWeight(steps[:, order], kind, scale, offset, order=order)


def stack_fp8(parts: Sequence[Fp8Weight]) -> Fp8Weight | None:
    """Return the weight of all rows of `parts`; None: they are of different kinds.

    Activations are quantised once for all, with the largest of their scales.
    """
    inputs = [part.input_scale for part in parts if part.input_scale is not None]
    rows = min(len(part.codes) // len(part.scale) for part in parts)
    if len({part.scale.shape[1] for part in parts}) > 1 or len(inputs) not in (0, len(parts)):
        return None
    scales = [
        part.scale.repeat_interleave(len(part.codes) // len(part.scale) // rows, 0)
        for part in parts
    ]
    codes = parts[0].codes
    if len(parts) > 1:  # as bytes: torch does not stack FP8 everywhere
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(codes.dtype)
    largest = torch.stack(inputs).amax(0) if inputs else None
    return Fp8Weight(codes, torch.cat(scales), largest)


def stack_coded(parts: Sequence[CodedWeight]) -> CodedWeight | None:
    """Return the weight of all rows of `parts`; None: they are of different kinds."""
    first = parts[0]
    for part in parts[1:]:
        if part.kind != first.kind or part.scale.shape[1] != first.scale.shape[1]:
            return None
        if not (_equal(part.table, first.table) and _equal(part.order, first.order)):
            return None
    offsets = [part.offset for part in parts if part.offset is not None]
    if offsets and len(offsets) < len(parts):
        middle = 2.0 ** (BITS[first.kind] - 1)
        offsets = [-middle * part.scale if part.offset is None else part.offset for part in parts]
    return CodedWeight(
        torch.cat([part.steps for part in parts]),
        first.kind,
        torch.cat([part.scale for part in parts]),
        torch.cat(offsets) if offsets else None,
        first.table,
        first.order,
    )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
