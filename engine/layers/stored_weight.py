"""Weights of quantised checkpoints, as products on a GPU take them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.layers.integer_weight import (
    Int8Weight,
    IntegerWeight,
    columns_of,
    groups_of,
    rows_of,
)
from kernels.quantized.codes import BITS, Codes, Kind, pack
from kernels.quantized.fp8_gemm import GROUP
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

    def packed(self) -> Codes:
        """Return the codes of products that widen them."""
        return pack(self.codes.view(torch.uint8), "e4m3", self.scale)

    def part(self, rows: Sequence[range], columns: range) -> Fp8Weight | WNA16Weight:
        """Return some rows, one range after the other, of some columns.

        Products of FP8 need whole blocks of these.
        """
        scale = _scales_of(self.scale, self.codes.shape, rows, columns)
        codes = columns_of(rows_of(self.codes.view(torch.uint8), rows), columns).contiguous()
        is_of_channels = scale.shape == (len(codes), 1)
        if not is_of_channels and codes.shape[1] != GROUP * scale.shape[1]:
            return WNA16Weight(codes, "e4m3", scale)
        return Fp8Weight(codes.view(self.codes.dtype), scale, self.input_scale)


class WNA16Weight(NamedTuple):
    """A weight [N, K]: `steps` * `scale` + `offset`, as `kernels.quantized.codes.pack` takes it.

    Attributes:
        steps: uint8 [N, K].
        scale: float32 [N / R, groups], of R output channels.
        offset: float32 [N, groups]; without offsets the middle of integers stands for 0.
        table: float32 [16], of the values that `steps` stand for.
        factor: float32 [N], by which all is multiplied, or None.
        order: int64 [K], the input that each column multiplies; None: they are in order.
    """

    steps: Tensor
    kind: Kind
    scale: Tensor
    offset: Tensor | None = None
    table: Tensor | None = None
    factor: Tensor | None = None
    order: Tensor | None = None

    def packed(self) -> Codes:
        """Return the codes of its rows, whose columns are in the order of `order`."""
        return pack(self.steps, self.kind, self.scale, self.offset, self.table, self.factor)

    def part(self, rows: Sequence[range], columns: range) -> WNA16Weight:
        """Return some rows, one range after the other, of some columns, if these are in order."""
        assert self.order is None or len(columns) == len(self.order)
        offset = self.offset
        if offset is not None:
            offset = groups_of(rows_of(offset, rows), self.steps.shape[1], columns)
        return self._replace(
            steps=columns_of(rows_of(self.steps, rows), columns).contiguous(),
            scale=_scales_of(self.scale, self.steps.shape, rows, columns),
            offset=offset,
            factor=None if self.factor is None else rows_of(self.factor, rows),
        )

    def rows(self, chosen: slice) -> WNA16Weight:
        """Return the weight of some rows."""
        offset, factor = (None if e is None else e[chosen] for e in (self.offset, self.factor))
        return self._replace(
            steps=self.steps[chosen], scale=self.scale[chosen], offset=offset, factor=factor
        )


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """Return the nearest FP8 to `weight`, with a scale per output channel, on its device."""
    codes, scale = quantize_rows(weight)
    return Fp8Weight(codes, scale[:, None])


def of_blocks(codes: Tensor, scale: Tensor, rows: int) -> Fp8Weight | WNA16Weight:
    """Return a weight [N, K] in FP8 with `scale` [N / `rows`, groups], rounded up.

    Activations are quantised where groups are as large as those of products of FP8.
    """
    # As many output channels share a scale as divide N, so that parts can be stacked.
    shared = math.gcd(len(codes), rows)
    scale = scale.repeat_interleave(rows // shared, 0)[: len(codes) // shared].contiguous()
    if codes.shape[1] == GROUP * scale.shape[1]:
        return Fp8Weight(codes, scale)
    return WNA16Weight(codes.view(torch.uint8), "e4m3", scale)


def of_integers(weight: IntegerWeight) -> WNA16Weight:
    """Return the weight that integers stand for."""
    if isinstance(weight, Int8Weight):
        steps = (weight.steps.short() + _HALF_BYTE).to(torch.uint8)
        return WNA16Weight(steps, "int8", weight.scale[:, None])
    kind: Kind = "int4" if weight.bits == 4 else "int8"
    return WNA16Weight(weight.steps, kind, weight.scale, weight.offset)


def in_groups(
    steps: Tensor, scale: Tensor, offset: Tensor, bits: int, group_of: Tensor
) -> WNA16Weight | None:
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
        return WNA16Weight(steps, kind, scale, offset)
    return WNA16Weight(steps[:, order], kind, scale, offset, order=order)


def stack_fp8(parts: Sequence[Fp8Weight]) -> Fp8Weight | None:
    """Return the weight of all rows of `parts`; None: they are of different kinds.

    Activations are quantised once for all, with the largest of their scales.
    """
    inputs = [part.input_scale for part in parts if part.input_scale is not None]
    if len({part.scale.shape[1] for part in parts}) > 1 or len(inputs) not in (0, len(parts)):
        return None
    codes = parts[0].codes
    if len(parts) > 1:  # as bytes: torch does not stack FP8 everywhere
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(codes.dtype)
    largest = torch.stack(inputs).amax(0) if inputs else None
    scale = _stack_scales([(len(part.codes), part.scale) for part in parts])
    return Fp8Weight(codes, scale, largest)


def stack_wna16(parts: Sequence[WNA16Weight]) -> WNA16Weight | None:
    """Return the weight of all rows of `parts`; None: they are of different kinds."""
    first = parts[0]
    for part in parts[1:]:
        if part.kind != first.kind or part.scale.shape[1] != first.scale.shape[1]:
            return None
        if not (_equal(part.table, first.table) and _equal(part.order, first.order)):
            return None
        if (part.factor is None) != (first.factor is None):
            return None
    offsets = [part.offset for part in parts if part.offset is not None]
    if offsets and len(offsets) < len(parts):
        middle = 2.0 ** (BITS[first.kind] - 1)
        offsets = [-middle * part.scale if part.offset is None else part.offset for part in parts]
    factors = [part.factor for part in parts if part.factor is not None]
    return WNA16Weight(
        torch.cat([part.steps for part in parts]),
        first.kind,
        _stack_scales([(len(part.steps), part.scale) for part in parts]),
        torch.cat(offsets) if offsets else None,
        first.table,
        torch.cat(factors) if factors else None,
        first.order,
    )


def _scales_of(scale: Tensor, shape: torch.Size, rows: Sequence[range], columns: range) -> Tensor:
    """Return the scales of some rows and columns of a weight, each of as many rows as can be.

    Args:
        scale: [N / R, groups], of R rows each.
        shape: of the weight.
    """
    size = shape[0] // len(scale)
    shared = math.gcd(size, *(bound for part in rows for bound in (part.start, part.stop)))
    scale = scale.repeat_interleave(size // shared, 0)
    parts = [range(part.start // shared, part.stop // shared) for part in rows]
    return groups_of(rows_of(scale, parts), shape[1], columns)


def _stack_scales(parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Return the scales of all rows, of as many rows each as all parts' can be.

    Args:
        parts: rows of each weight, and its scales.
    """
    shared = math.gcd(*(rows // len(scale) for rows, scale in parts))
    return torch.cat(
        [scale.repeat_interleave(rows // len(scale) // shared, 0) for rows, scale in parts]
    )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
