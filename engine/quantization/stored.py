"""StoredProjection: the tensors of a quantised checkpoint that a projection is stored in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.layers.integer_weight import IntegerKind, IntegerWeight, columns_of, rows_of
from engine.layers.linear.linear import parameter
from engine.layers.stored_weight import Fp8Weight, WNA16Weight
from engine.models.sharding import ranges_of
from engine.models.spec import ShardRange
from engine.quantization.format import Axis, Format, num_bytes_of_codes
from kernels.quantized.codes import can_pack


class Window(NamedTuple):
    """What a rank has of a weight [out_features, in_features].

    Attributes:
        shape: of the whole weight.
        rows: those of the rank, in parts one after the other.
        columns: likewise.
    """

    shape: tuple[int, int]
    rows: tuple[range, ...]
    columns: range

    @classmethod
    def of(
        cls, out_features: int, in_features: int, parts: tuple[ShardRange, ...], *, is_summed: bool
    ) -> Window:
        """Return the window of a rank's projection.

        Args:
            out_features, in_features: of the rank.
            parts: heads or features that it has; (): it has all.
            is_summed: they are inputs of the projection, not outputs.
        """
        if not parts:
            return cls((out_features, in_features), (range(out_features),), range(in_features))
        size = in_features if is_summed else out_features
        unit = size // sum(part.size for part in parts)
        found, whole = ranges_of(parts, unit), unit * sum(part.full for part in parts)
        if not is_summed:
            return cls((whole, in_features), found, range(in_features))
        (columns,) = found
        return cls((out_features, whole), (range(out_features),), columns)

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.rows))


class Cut(NamedTuple):
    """The elements that a rank has of a dimension of a stored tensor, one range after the other."""

    dim: int
    ranges: tuple[range, ...]


class StoredProjection(nn.Module):
    """The tensors of one projection [out_features, in_features], or of one in each expert.

    A rank has the elements with its rows or columns of the weight. Those that are stored together
    with others it has too, and drops their weights.

    Attributes:
        integer_kind: of what `integers` returns, as far as it is known before they are read.
        stays_on_gpu: whether `for_gpu` returns a weight, likewise.
        cuts: of the tensors of which it has a part, by name; dimensions of one projection.
        unit: how many columns are stored together, in one that is stored in parts.
        num_rows: of the weight that it returns.
        num_weights: that its tensors stand for, in each expert.

    Args:
        window: of the weight.
        path: the name of the projection, for errors.
        count: of experts; None: it is a projection of all tokens.
    """

    def __init__(
        self,
        fmt: Format,
        window: Window,
        *,
        path: str,
        device: torch.device,
        count: int | None = None,
    ) -> None:
        super().__init__()
        self._format, self._path = fmt, path
        self._window, self._count = window, count or 1
        self.num_rows = window.num_rows
        stored = fmt.tensors(*window.shape)
        num_rows, num_columns = window.shape
        row_axes, column_axes = (
            [axis for axis in axes if axis is not None]
            for axes in zip(*((each.rows, each.columns) for each in stored.values()), strict=True)
        )
        rows, self._rows = _read_parts(window.rows, num_rows, row_axes)
        (columns,), (self._columns,) = _read_parts([window.columns], num_columns, column_axes)
        self.unit = _unit(column_axes)
        self._read = sum(map(len, rows)), len(columns)
        self.num_weights = math.prod(self._read)
        self.integer_kind = self._kind()
        self.stays_on_gpu = fmt.stays_on_gpu(*self._read) and self._can_be_packed
        self.cuts: dict[str, Cut] = {}
        self._shapes = [name for name, each in stored.items() if each.is_shape]
        self._names = list(stored)
        leading = () if count is None else (count,)
        self._tensors = nn.ParameterList()
        for name, each in stored.items():
            shape = list(each.shape)
            for axis, parts in ((each.rows, rows), (each.columns, [columns])):
                if axis is None:
                    continue
                ranges = tuple(map(axis.range_of, parts))
                if ranges != (range(shape[axis.dim]),):
                    self.cuts[name] = Cut(axis.dim, ranges)
                    shape[axis.dim] = sum(map(len, ranges))
            self._tensors.append(parameter(*leading, *shape, dtype=each.dtype, device=device))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by the rest of their names; those of experts begin with a dimension of them.

        In a list of modules they could not have the dots that some names have.
        """
        return dict(zip(self._names, self._tensors, strict=True))

    def in_order(self, bias: Tensor) -> Tensor:
        """Return the stored bias in the order of the weight's rows."""
        return self._format.in_order(bias)

    @property
    def num_bytes_on_gpu(self) -> int:
        """The bytes that what `for_gpu` returns takes, at most; of all experts."""
        rows = self._window.num_rows
        if self._has_whole_columns:
            return self._count * self._format.num_bytes_on_gpu(rows, self._read[1])
        columns = len(self._window.columns)
        group = math.gcd(self._columns.start, columns)  # at least, of 8 bits at most
        return self._count * num_bytes_of_codes(rows, columns, 8, group, shift=2)

    def checked(self) -> dict[str, Tensor]:
        """Return the tensors.

        Raises:
            CheckpointError: a value is not finite, or 0 where it must not be.
        """
        found = self.tensors
        for name in self._shapes:
            if any(each != list(self._window.shape) for each in found[name].view(-1, 2).tolist()):
                raise CheckpointError(
                    f"must be {list(self._window.shape)}", param=f"{self._path}.{name}"
                )
        for name, tensor in found.items():
            if tensor.dtype != torch.float32:
                continue
            if not bool(tensor.isfinite().all()):
                raise CheckpointError("a value is not finite", param=f"{self._path}.{name}")
            if name not in self._format.may_be_zero and not bool(tensor.all()):
                raise CheckpointError("a scale is 0", param=f"{self._path}.{name}")
        return found

    def integers(self) -> IntegerWeight | None:
        """Return the weight as integers, where it is stored so.

        Raises:
            CheckpointError: a scale is not finite or 0.
        """
        tensors = self.checked()
        try:
            weight = self._format.integers(tensors)
        except CheckpointError as error:
            raise self._located(error) from None
        if weight is None or self._has_all:
            return weight
        return weight.part(self._rows, self._columns)

    def for_gpu(self) -> Fp8Weight | WNA16Weight | None:
        """Return the weight as it is stored, for products on a GPU.

        Raises:
            CheckpointError: a scale is not finite or 0, or an index is out of range.
        """
        tensors = self.checked()
        try:
            return self._part_for_gpu(tensors)
        except CheckpointError as error:
            raise self._located(error) from None

    def each_for_gpu(self) -> Iterator[Fp8Weight | WNA16Weight | None]:
        """Yield the same of each expert.

        Raises:
            CheckpointError: likewise.
        """
        tensors = self.checked()
        try:
            for i in range(len(self._tensors[0])):
                yield self._part_for_gpu({name: tensor[i] for name, tensor in tensors.items()})
        except CheckpointError as error:
            raise self._located(error) from None

    def dequantize_to(self, weight: Tensor) -> None:
        """Write the weight that it stands for, or those of all experts.

        Args:
            weight: float [out_features, in_features], with experts [count, ...]; may be strided.

        Raises:
            CheckpointError: a scale is not finite or 0, or an index is out of range.
        """
        tensors = self.checked()
        try:
            if weight.dim() == 2:
                weight.copy_(self._dequantized(tensors))
                return
            for i, each in enumerate(weight):  # the float32 weight of one at a time
                own = {name: tensor[i] for name, tensor in tensors.items()}
                each.copy_(self._dequantized(own))
        except CheckpointError as error:
            raise self._located(error) from None

    @property
    def _has_whole_columns(self) -> bool:
        """Whether it takes the weights of all columns that it reads."""
        return len(self._columns) == self._read[1]

    @property
    def _has_all(self) -> bool:
        return self._has_whole_columns and self._window.num_rows == self._read[0]

    @property
    def _can_be_packed(self) -> bool:
        """Whether products on a GPU have groups as its columns are cut into."""
        is_cut = len(self._window.columns) < self._window.shape[1]
        if is_cut and self._format.has_any_order:
            return False
        size = len(self._window.columns)
        return self._has_whole_columns or can_pack(math.gcd(self._columns.start, size))

    def _kind(self) -> IntegerKind | None:
        kind, size = self._format.integer_kind(self._read[1]), len(self._columns)
        if kind is None or kind.group_size is None or self._has_whole_columns:
            return kind
        if kind.group_size == self._read[1]:
            return kind._replace(group_size=size)
        return kind._replace(group_size=math.gcd(kind.group_size, self._columns.start, size))

    def _part_for_gpu(self, tensors: dict[str, Tensor]) -> Fp8Weight | WNA16Weight | None:
        weight = self._format.for_gpu(tensors)
        if weight is None or self._has_all:
            return weight
        return weight.part(self._rows, self._columns)

    def _dequantized(self, tensors: dict[str, Tensor]) -> Tensor:
        weight = self._format.dequantize(tensors)
        return weight if self._has_all else columns_of(rows_of(weight, self._rows), self._columns)

    def _located(self, error: CheckpointError) -> CheckpointError:
        """Return the error of the format with the full names of its tensors."""
        names = [f"{self._path}.{name}" for name in error.params]
        return error.reworded(error.message, param=names)


def _read_parts(
    parts: Sequence[range], size: int, axes: Sequence[Axis]
) -> tuple[list[range], list[range]]:
    """Return which of `size` rows or columns are read, and where `parts` are in that.

    Those that are stored together are; all, where no tensor has an axis of them.
    """
    if not axes:
        return [range(size)], list(parts)
    unit, before = _unit(axes), 0
    read, found = [], []
    for part in parts:
        first = part.start // unit * unit
        read.append(range(first, min(-(-part.stop // unit) * unit, size)))
        start = before + part.start - first
        found.append(range(start, start + len(part)))
        before += len(read[-1])
    return read, found


def _unit(axes: Iterable[Axis]) -> int:
    """Return how many rows or columns are stored together."""
    return math.lcm(*(axis.weights for axis in axes))
