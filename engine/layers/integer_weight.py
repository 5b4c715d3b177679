"""Weights of integers, as products on a CPU take them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_FLOAT_BYTES = 4  # of the scale of a row
_HALF_BYTES = 2  # of a scale and of an offset of a group, where they are multiplied
_LARGEST_HALF = torch.finfo(torch.float16).max
_MOST_STEPS = 15  # in 4 bits
_LARGEST_STEP = 127  # in 8 bits, on either side of 0
_FITS = 2
# Quantised at once: few enough to stay in the processor's cache, and for PyTorch to run each
# operation on one thread, without waiting for others.
_CHUNK_ELEMENTS = 2**15 - 1


class IntegerKind(NamedTuple):
    """What the integers of a weight are.

    Attributes:
        bits: of each.
        group_size: inputs that share a scale and an offset; None: a row has one scale, no offset.
    """

    bits: int
    group_size: int | None

    def num_bytes(self, num_rows: int, num_columns: int) -> int:
        """Return the bytes of such a weight [N, K]; at most: its groups may have no offsets."""
        steps = num_rows * num_columns * self.bits // 8
        if self.group_size is None:
            return steps + num_rows * _FLOAT_BYTES
        return steps + num_rows * (num_columns // self.group_size) * 2 * _HALF_BYTES


class Int8Weight(NamedTuple):
    """A weight [N, K]: int8 steps [N, K], and the float32 scales [N] of the rows."""

    steps: Tensor
    scale: Tensor

    @property
    def kind(self) -> IntegerKind:
        return IntegerKind(8, None)

    def part(self, rows: Sequence[range], columns: range) -> Int8Weight:
        """Return some rows, one range after the other, of some columns."""
        steps = columns_of(rows_of(self.steps, rows), columns).contiguous()
        return Int8Weight(steps, rows_of(self.scale, rows))


class GroupedWeight(NamedTuple):
    """A weight [N, K] of `bits` bits, `steps * scale + offset` with both of a group of inputs.

    `steps` is uint8 [N, K]; `scale` and `offset` are float32 [N, groups]. Without an offset the
    middle of the steps, `zero`, stands for 0: `(steps - zero) * scale`.
    """

    steps: Tensor
    scale: Tensor
    offset: Tensor | None
    bits: int

    @property
    def zero(self) -> int:
        zero: int = 2 ** (self.bits - 1)
        return zero

    @property
    def group_size(self) -> int:
        """Inputs of a group, which are consecutive."""
        return self.steps.shape[1] // self.scale.shape[1]

    @property
    def kind(self) -> IntegerKind:
        return IntegerKind(self.bits, self.group_size)

    @property
    def fits(self) -> bool:
        """Whether scales and offsets are in the range of float16, in which they are multiplied."""
        values = (self.scale,) if self.offset is None else (self.scale, self.offset)
        return all(bool((each.abs() <= _LARGEST_HALF).all()) for each in values)

    def dequantized(self) -> Tensor:
        """Return the float32 weight [N, K]."""
        scale = self.scale.repeat_interleave(self.group_size, 1)
        if self.offset is None:
            return (self.steps.float() - self.zero) * scale
        return self.steps * scale + self.offset.repeat_interleave(self.group_size, 1)

    def part(self, rows: Sequence[range], columns: range) -> GroupedWeight:
        """Return some rows, one range after the other, of some columns.

        Where these begin or end within a group, all groups are cut into parts as long.
        """
        depth = self.steps.shape[1]
        scale, offset = (
            None if each is None else groups_of(rows_of(each, rows), depth, columns)
            for each in (self.scale, self.offset)
        )
        assert scale is not None
        steps = columns_of(rows_of(self.steps, rows), columns).contiguous()
        return GroupedWeight(steps, scale, offset, self.bits)

    def with_offset(self) -> GroupedWeight:
        """Return it with an offset, if it has none."""
        return self if self.offset is not None else self._replace(offset=-self.zero * self.scale)

    def widened(self, kind: IntegerKind) -> GroupedWeight:
        """Return it with integers of `kind`, of no fewer bits, in parts of its groups."""
        steps, zero = self.steps, 2 ** (kind.bits - 1)
        if self.offset is None:
            steps = steps + (zero - self.zero)
        times = self.group_size // (kind.group_size or self.group_size)
        scale = self.scale.repeat_interleave(times, 1)
        offset = None if self.offset is None else self.offset.repeat_interleave(times, 1)
        return GroupedWeight(steps, scale, offset, kind.bits)


IntegerWeight = Int8Weight | GroupedWeight


def rows_of(tensor: Tensor, rows: Sequence[range]) -> Tensor:
    """Return some rows of `tensor`, one range after the other."""
    parts = [tensor[each.start : each.stop] for each in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def columns_of(tensor: Tensor, columns: range) -> Tensor:
    """Return some columns of `tensor`."""
    return tensor[:, columns.start : columns.stop]


def groups_of(scales: Tensor, depth: int, columns: range) -> Tensor:
    """Return the scales [N, groups] of some of `depth` columns, of parts of groups if need be."""
    num_groups = scales.shape[1]
    if num_groups == 1:
        return scales
    size = depth // num_groups
    part = math.gcd(size, columns.start, len(columns))
    found = scales.repeat_interleave(size // part, 1)
    return found[:, columns.start // part : columns.stop // part]


def common_kind(kinds: Collection[IntegerKind]) -> IntegerKind | None:
    """Return the kind that integers of all `kinds` can be; None: some have groups, some not."""
    sizes = [kind.group_size for kind in kinds if kind.group_size is not None]
    if not sizes:
        return IntegerKind(8, None)
    if len(sizes) < len(kinds):
        return None
    return IntegerKind(max(kind.bits for kind in kinds), math.gcd(*sizes))


def stack(parts: Sequence[IntegerWeight]) -> IntegerWeight | None:
    """Return the weight of all rows of `parts`; None: some have groups, some not."""
    channels = [part for part in parts if isinstance(part, Int8Weight)]
    groups = [part for part in parts if isinstance(part, GroupedWeight)]
    kind = common_kind([part.kind for part in parts])
    if kind is None:
        return None
    if not groups:
        return Int8Weight(*(torch.cat(each) for each in zip(*channels, strict=True)))
    groups = [part if part.kind == kind else part.widened(kind) for part in groups]
    if any(part.offset is not None for part in groups):
        groups = [part.with_offset() for part in groups]
    offsets = [part.offset for part in groups if part.offset is not None]
    return GroupedWeight(
        torch.cat([part.steps for part in groups]),
        torch.cat([part.scale for part in groups]),
        torch.cat(offsets) if offsets else None,
        kind.bits,
    )


def round_to_8_bits(weight: Tensor, group_size: int) -> GroupedWeight:
    """Return float32 `weight` [N, K] in 8 bits, in groups of consecutive inputs.

    It is rounded to the nearest of 127 steps of the largest magnitude of each group.
    """
    groups = weight.view(len(weight), -1, group_size)
    half = torch.finfo(torch.float16)
    least = half.smallest_normal * half.eps  # of groups of zeros
    scale = (groups.abs().amax(-1) / _LARGEST_STEP).clamp_min(least).half().float()
    steps = (groups / scale[..., None]).round_().clamp_(-_LARGEST_STEP, _LARGEST_STEP)
    return GroupedWeight((steps + (_LARGEST_STEP + 1)).to(torch.uint8).flatten(1), scale, None, 8)


def quantize_groups(weight: Tensor, group_size: int) -> GroupedWeight:
    """Return `weight` [N, K] in 4 bits, in groups of consecutive inputs.

    Each group's range is cut into 15 steps; then scale and offset are fitted to the steps by least
    squares, twice. That makes 7.4 % of error of normal weights in groups of 32, RMS; without it
    there are 7.8 %, and symmetric to 0, without an offset, 8.6 %. Both are rounded to float16.
    """
    num_rows, num_columns = weight.shape
    steps = torch.empty_like(weight, dtype=torch.uint8)
    groups = (num_rows, num_columns // group_size)
    scale, offset = (torch.empty(groups, device=weight.device) for _ in range(2))
    at_once = max(1, _CHUNK_ELEMENTS // num_columns)
    for source, to, its_scale, its_offset in zip(
        *(torch.split(tensor, at_once) for tensor in (weight, steps, scale, offset)), strict=True
    ):
        # Sums over rows are several times faster than those along such short ones.
        values = source.view(-1, group_size).t().to(torch.float32, copy=True).contiguous()
        fitted = _fit_columns(values)
        to.view(-1, group_size).copy_(fitted.steps.t())
        its_scale.view(-1).copy_(fitted.scale.half())
        its_offset.view(-1).copy_(fitted.offset.half())
    return GroupedWeight(steps, scale, offset, 4)


class _Fitted(NamedTuple):
    steps: Tensor
    scale: Tensor
    offset: Tensor


def _fit_columns(values: Tensor) -> _Fitted:
    """Return float32 steps, and a scale and an offset of each column."""
    tiny = torch.finfo(torch.float32).tiny  # for groups of one value
    mean, offset = values.mean(0), values.amin(0)
    scale = (values.amax(0) - offset).div_(_MOST_STEPS).clamp_min_(tiny)
    for _ in range(_FITS):
        steps = (values - offset).div_(scale).round_().clamp_(0, _MOST_STEPS)
        middle = steps.mean(0)
        distance = steps - middle
        shared = (distance * values).sum(0)
        scale = shared.div_(distance.square_().sum(0).clamp_min_(tiny)).clamp_min_(tiny)
        offset = mean - scale * middle
    return _Fitted(steps, scale, offset)
