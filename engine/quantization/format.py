"""Format: how a projection is stored in a quantised checkpoint, and what its weight is."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.layers.integer_weight import IntegerKind, IntegerWeight
from engine.layers.stored_weight import Fp8Weight, WNA16Weight, of_integers
from kernels.quantized.codes import can_pack


class Axis(NamedTuple):
    """The dimension of a stored tensor along which it has the rows, or the columns, of a weight.

    Attributes:
        weights: which have `elements` of the tensor together.
    """

    dim: int
    weights: int = 1
    elements: int = 1

    def range_of(self, part: range) -> range:
        """Return the elements of some rows or columns, whole ones at both ends."""
        return range(
            part.start // self.weights * self.elements,
            -(-part.stop // self.weights) * self.elements,
        )


class Stored(NamedTuple):
    """A tensor of the checkpoint. One of a float type may be stored in any other.

    Attributes:
        rows, columns: of the weight; None: it is of all of them.
        is_shape: it holds the two sizes of the weight.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Axis | None = None
    columns: Axis | None = None
    is_shape: bool = False


class Format(Protocol):
    """A way to store the weight [out_features, in_features] of a projection in several tensors."""

    @property
    def label(self) -> str:
        """The name of the format, for the log."""

    @property
    def is_of_experts(self) -> bool:
        """Whether the experts of mixtures alone are stored so."""
        return False

    @property
    def may_be_zero(self) -> frozenset[str]:
        """The float32 tensors whose values may be 0, as scales may not; all must be finite."""
        return frozenset()

    @property
    def has_any_order(self) -> bool:
        """Whether the inputs of a group may be any, so that some of them are in all groups."""
        return False

    def tensors(self, out_features: int, in_features: int) -> dict[str, Stored]:
        """Return the tensors that a projection is stored in, by the rest of their names.

        A rank has the elements of its rows or its columns. Where no tensor has an axis of them, it
        has all, and takes its part of the weight.

        Raises:
            UnsupportedError: the format cannot hold a weight of this shape.
            CheckpointError: the checkpoint names another.
        """

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the weight in float32 that `tensors` stand for.

        Raises:
            ValueError: a tensor, which the message names, holds what it must not.
        """

    def in_order(self, rows: Tensor) -> Tensor:
        """Return stored rows, or the stored bias, in the order of the weight's rows."""
        return rows

    def integer_kind(self, in_features: int) -> IntegerKind | None:
        """Return what `integers` returns, known before a weight is read; None: nothing."""
        return None

    def integers(self, tensors: Mapping[str, Tensor]) -> IntegerWeight | None:
        """Return the weight as integers, for products of them; None: it is not stored so."""
        return None

    def stays_on_gpu(self, out_features: int, in_features: int) -> bool:
        """Return whether `for_gpu` returns a weight, known before one is read."""
        kind = self.integer_kind(in_features)
        return kind is not None and can_pack(kind.group_size or in_features)

    def num_bytes_on_gpu(self, out_features: int, in_features: int) -> int:
        """Return the bytes that the weight of `for_gpu` takes, at most."""
        kind = self.integer_kind(in_features)
        assert kind is not None
        group = kind.group_size or in_features
        return num_bytes_of_codes(out_features, in_features, kind.bits, group, scale=4, shift=2)

    def for_gpu(self, tensors: Mapping[str, Tensor]) -> Fp8Weight | WNA16Weight | None:
        """Return the weight as it is stored, for products on a GPU; None: there are none of it.

        Raises:
            ValueError: as in `dequantize`.
        """
        weight = self.integers(tensors)
        return None if weight is None else of_integers(weight)


class QuantizedCheckpoint(Protocol):
    """How the projections of a checkpoint are stored."""

    @property
    def label(self) -> str:
        """The name of its format, for the log."""

    def tensor_names(self) -> Collection[str]:
        """Return the names of all its tensors.

        Raises:
            CheckpointError: a file is missing or broken.
        """

    def head(self, rows: slice) -> IntegerWeight | None:
        """Return rows of the head, of the embedding if both are tied, where it is integers.

        Raises:
            CheckpointError: the file cannot be read.
        """
        return None

    def format_of(self, module: str, *, is_expert: bool) -> Format | None:
        """Return how the projection `module` is stored; None: in floating point.

        Args:
            module: as the checkpoint names it.
            is_expert: it is one of an expert's, or stands for those of all.

        Raises:
            CheckpointError: the checkpoint lacks it.
        """


def num_bytes_of_codes(
    out_features: int, in_features: int, bits: int, group: int, *, scale: int = 4, shift: int = 0
) -> int:
    """Return the bytes of a weight in codes, with `scale` and `shift` of each group of inputs."""
    run = 2 * math.gcd(group, 64) if bits == 4 else 1  # rows of 4 bits end with whole runs
    padded = -(-in_features // run) * run
    return out_features * (padded * bits // 8 + in_features // group * (scale + shift))


def unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Return the unsigned integers of `bits` bits that int32 words hold, lowest bits first.

    Args:
        packed: int32; 32 / `bits` integers along `dim` are in one word.

    Returns:
        int32 with `dim` as many times longer.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    dim %= packed.dim()
    shape = [-1] + [1] * (packed.dim() - 1 - dim)
    values = (packed.unsqueeze(dim + 1) >> shifts.view(shape)) & (2**bits - 1)
    unpacked: Tensor = values.flatten(dim, dim + 1)
    return unpacked
