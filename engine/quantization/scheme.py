"""Quantized: the scheme of quantised checkpoints, which loads projections as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError, UnsupportedError
from engine.layers.int8_linear import Int8Weight
from engine.layers.linear import GatedLinear, Linear, parameter
from engine.models.tensor_names import TensorNames
from engine.quantization.format import Format
from engine.quantization.registry import QuantizedCheckpoint
from kernels.cpu.activation import Activation

_META = torch.device("meta")


class QuantizedLinear(nn.Module):
    """A projection, or several stacked ones, as a quantised checkpoint stores them.

    `engine.models.conversion` replaces it after loading: by a product of 8-bit integers, or by what
    `dequantized` returns, in the form for its device.

    Attributes:
        device: of its tensors.
        num_bytes_dequantized: of the weight that it stands for.

    Args:
        plain: of the same shape, without memory (on the meta device).
        path: the name of the module, for errors.
    """

    def __init__(self, plain: Linear, fmt: Format, path: str, device: torch.device) -> None:
        super().__init__()
        self._plain, self._format, self._path = [plain], fmt, path
        self.device = device
        self.num_bytes_dequantized = plain.weight.nbytes
        self._names: dict[str, dict[str, str]] = {}
        for part, out_features in plain.parts.items():
            stored = fmt.tensors(out_features, plain.weight.shape[1])
            self._names[part] = {name: f"{part}_{name}" for name in stored}
            for name, (shape, dtype) in stored.items():
                tensor = parameter(*shape, dtype=dtype, device=device)
                self.register_parameter(f"{part}_{name}", tensor)
        self.bias: nn.Parameter | None = None
        if plain.bias is not None:
            self.bias = parameter(len(plain.bias), dtype=plain.bias.dtype, device=device)

    @property
    def plain(self) -> Linear:
        """The projection that it stands for, without memory."""
        return self._plain[0]

    def destinations(self) -> dict[str, Tensor]:
        """Return where each tensor of the checkpoint goes, by its name beside this module."""
        places: dict[str, Tensor] = {}
        for part, names in self._names.items():
            places |= {f"{part}.{name}": self.get_parameter(own) for name, own in names.items()}
        if self.bias is not None:
            biases = torch.split(self.bias, list(self.plain.parts.values()))
            places |= {f"{part}.bias": b for part, b in zip(self._names, biases, strict=True)}
        return places

    def dequantized(self) -> Linear:
        """Return the projection with its weight.

        Raises:
            CheckpointError: a scale is not finite or 0, or an index is out of range.
        """
        plain = self.plain.to_empty(device=self.device)
        weights = torch.split(plain.weight, list(plain.parts.values()))
        for (part, tensors), weight in zip(self._checked().items(), weights, strict=True):
            try:
                weight.copy_(self._format.dequantize(tensors))
            except ValueError as error:
                raise CheckpointError(f"{self._path}.{part}.{error}") from None
        if self.bias is not None:
            assert plain.bias is not None
            plain.bias.copy_(self.bias)
        return plain

    def int8(self) -> Int8Weight | None:
        """Return the weight as 8-bit integers, where it is stored so.

        Raises:
            CheckpointError: a scale is not finite or 0.
        """
        parts = [self._format.int8(tensors) for tensors in self._checked().values()]
        stored = [part for part in parts if part is not None]
        if len(stored) < len(parts):
            return None
        return Int8Weight(*(torch.cat(tensors) for tensors in zip(*stored, strict=True)))

    def _checked(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of each part, whose scales are numbers."""
        found: dict[str, dict[str, Tensor]] = {
            part: {name: self.get_parameter(own) for name, own in names.items()}
            for part, names in self._names.items()
        }
        for part, tensors in found.items():
            for name, tensor in tensors.items():
                _check_scale(f"{self._path}.{part}.{name}", tensor)
        return found


def _check_scale(name: str, tensor: Tensor) -> None:
    # What is stored as a float number, beside FP8 weights, is a scale.
    if tensor.dtype == torch.float32 and not bool((tensor.isfinite() & (tensor != 0)).all()):
        raise CheckpointError(f"{name}: a scale is 0 or not finite")


@dataclass(frozen=True, slots=True)
class Quantized:
    """Makes the linears that the checkpoint has quantised, and plain ones of the others.

    Attributes:
        names: how the checkpoint names our modules.
        path: our name of the module for which it makes them.
    """

    checkpoint: QuantizedCheckpoint
    names: TensorNames
    dtype: torch.dtype
    device: torch.device
    path: str = "model"

    def at(self, name: str) -> Quantized:
        return replace(self, path=f"{self.path}.{name}")

    def linear(self, in_features: int, parts: Mapping[str, int], *, bias: bool) -> nn.Module:
        device = self._plain_device(*parts)
        plain = Linear(in_features, parts, bias=bias, dtype=self.dtype, device=device or _META)
        return plain if device else self._quantized(plain)

    def gated_linear(
        self, in_features: int, size: int, *, activation: Activation, bias: bool
    ) -> nn.Module:
        device = self._plain_device("gate_proj", "up_proj")
        plain = GatedLinear(
            in_features,
            size,
            activation=activation,
            bias=bias,
            dtype=self.dtype,
            device=device or _META,
        )
        return plain if device else self._quantized(plain)

    def _plain_device(self, *parts: str) -> torch.device | None:
        """Return where projections are that are not quantised; None for quantised ones."""
        prefix = self.names.prefixes[0]
        paths = (self.names.of(f"{self.path}.{part}", prefix) for part in parts)
        quantized = {self.checkpoint.is_quantized(path) for path in paths}
        if len(quantized) > 1:
            raise UnsupportedError(
                f"quantization_config: of {', '.join(parts)} in {self.path} all must be quantised, "
                "or none"
            )
        return None if quantized == {True} else self.device

    def _quantized(self, plain: Linear) -> QuantizedLinear:
        return QuantizedLinear(plain, self.checkpoint.format, self.path, self.device)
