"""StoredProjection: the tensors of a quantised checkpoint that a projection is stored in."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.layers.integer_weight import IntegerWeight
from engine.layers.linear.linear import parameter
from engine.layers.stored_weight import Fp8Weight, WNA16Weight
from engine.quantization.format import Format


class StoredProjection(nn.Module):
    """The tensors of one projection [out_features, in_features], or of one in each expert.

    Attributes:
        integer_kind: of what `integers` returns, as far as it is known before they are read.
        stays_on_gpu: whether `for_gpu` returns a weight, likewise.

    Args:
        path: the name of the projection, for errors.
        count: of experts; None: it is a projection of all tokens.
    """

    def __init__(
        self,
        fmt: Format,
        out_features: int,
        in_features: int,
        *,
        path: str,
        device: torch.device,
        count: int | None = None,
    ) -> None:
        super().__init__()
        self._format, self._path = fmt, path
        self._shape, self._count = (out_features, in_features), count or 1
        self.integer_kind = fmt.integer_kind(in_features)
        self.stays_on_gpu = fmt.stays_on_gpu(out_features, in_features)
        leading = () if count is None else (count,)
        stored = fmt.tensors(out_features, in_features)
        self._names = list(stored)
        self._tensors = nn.ParameterList(
            parameter(*leading, *shape, dtype=dtype, device=device)
            for shape, dtype in stored.values()
        )

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
        return self._count * self._format.num_bytes_on_gpu(*self._shape)

    def checked(self) -> dict[str, Tensor]:
        """Return the tensors.

        Raises:
            CheckpointError: a value is not finite, or 0 where it must not be.
        """
        found = self.tensors
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
            return self._format.integers(tensors)
        except CheckpointError as error:
            raise self._located(error) from None

    def for_gpu(self) -> Fp8Weight | WNA16Weight | None:
        """Return the weight as it is stored, for products on a GPU.

        Raises:
            CheckpointError: a scale is not finite or 0, or an index is out of range.
        """
        tensors = self.checked()
        try:
            return self._format.for_gpu(tensors)
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
                yield self._format.for_gpu({name: tensor[i] for name, tensor in tensors.items()})
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
                weight.copy_(self._format.dequantize(tensors))
                return
            for i, each in enumerate(weight):  # the float32 weight of one at a time
                own = {name: tensor[i] for name, tensor in tensors.items()}
                each.copy_(self._format.dequantize(own))
        except CheckpointError as error:
            raise self._located(error) from None

    def _located(self, error: CheckpointError) -> CheckpointError:
        """Return the error of the format with the full names of its tensors."""
        names = [f"{self._path}.{name}" for name in error.params]
        return error.reworded(error.message, param=names)
