"""Quantized: the scheme of quantised checkpoints, which loads projections as they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from engine.errors import UnsupportedError
from engine.layers.experts import Experts
from engine.layers.linear.linear import GatedLinear, Linear
from engine.models.sharding import SUMMED, parts_of
from engine.models.spec import ModelSpec
from engine.models.tensor_names import ExpertTensors, TensorNames
from engine.quantization.experts import QuantizedExperts
from engine.quantization.format import Format, QuantizedCheckpoint
from engine.quantization.linear import QuantizedLinear
from engine.quantization.stored import Window
from kernels.cpu.activation import Activation
from kernels.experts.activation import ExpertActivation

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Quantized:
    """Makes the modules that the checkpoint has quantised, and plain ones of the others.

    Attributes:
        spec: of the model, or of a rank.
        prefix: which of the prefixes of its tensor names the checkpoint uses.
        path: our name of the module for which it makes them.
    """

    checkpoint: QuantizedCheckpoint
    spec: ModelSpec
    prefix: str
    dtype: torch.dtype
    device: torch.device
    path: str = "model"

    def at(self, name: str) -> Quantized:
        return replace(self, path=f"{self.path}.{name}")

    def linear(self, in_features: int, parts: Mapping[str, int], *, bias: bool) -> nn.Module:
        stored = self._stored_parts(parts)
        formats = self._formats(stored, is_expert=False)
        device = _META if formats else self.device
        plain = Linear(in_features, parts, bias=bias, dtype=self.dtype, device=device)
        return self._quantized(plain, stored, formats) if formats else plain

    def gated_linear(
        self, in_features: int, size: int, *, activation: Activation, bias: bool
    ) -> nn.Module:
        stored = self._stored_parts({"gate_proj": size, "up_proj": size})
        formats = self._formats(stored, is_expert=False)
        plain = GatedLinear(
            in_features,
            size,
            activation=activation,
            bias=bias,
            dtype=self.dtype,
            device=_META if formats else self.device,
        )
        return self._quantized(plain, stored, formats) if formats else plain

    def experts(
        self,
        hidden_size: int,
        size: int,
        num_experts: int,
        *,
        activation: ExpertActivation,
        bias: bool,
    ) -> nn.Module:
        layout, name = self._names.experts or "each", self.path.rpartition(".")[2]
        projections = ("gate_proj", "up_proj", "down_proj")
        if layout == "each":
            parts = [f"{name}.{i}.{part}" for i in range(num_experts) for part in projections]
        elif layout == "projection":
            parts = [f"{name}.{part}" for part in projections]
        else:
            parts = [name]
        formats = self._formats(parts, is_expert=True)
        plain = Experts(
            hidden_size,
            size,
            num_experts,
            activation=activation,
            bias=bias,
            dtype=self.dtype,
            device=_META if formats else self.device,
        )
        if not formats:
            return plain
        if layout == "gates and ups" and self._names.gates_first:
            raise UnsupportedError(
                f"experts in one tensor ({self._stored_name(name)}) are not "
                "supported for this architecture",
                param="quantization_config",
            )
        gate_up = {"gate_proj": size, "up_proj": size}
        if layout == "gates and ups":
            gate_up = {"gate_up_proj": 2 * size}
        windows = {
            part: self._window(f"{self.path}.{part}", rows, hidden_size)
            for part, rows in gate_up.items()
        }
        windows["down_proj"] = self._window(f"{self.path}.down_proj", hidden_size, size)
        return QuantizedExperts(
            plain,
            windows,
            _by_projection(formats, layout),
            layout=layout,
            path=self.path,
            device=self.device,
        )

    @property
    def _names(self) -> TensorNames:
        return self.spec.tensor_names

    @property
    def _parent(self) -> str:
        return self.path.rpartition(".")[0]

    def _stored_parts(self, parts: Mapping[str, int]) -> dict[str, int]:
        """Return the projections that the checkpoint has of a linear, with their features."""
        name = self.path.rpartition(".")[2]
        return {name: sum(parts.values())} if name in self._names.stacked else dict(parts)

    def _formats(self, parts: Iterable[str], *, is_expert: bool) -> dict[str, Format]:
        """Return the format of each projection; nothing, if they are not quantised."""
        found = {
            part: self.checkpoint.format_of(self._stored_name(part), is_expert=is_expert)
            for part in parts
        }
        formats = {part: fmt for part, fmt in found.items() if fmt is not None}
        if formats and len(formats) < len(found):
            raise UnsupportedError(
                f"{', '.join(found)} in {self._parent} are fused and "
                "need one quantisation for all of them; quantise all or none",
                param="quantization_config",
            )
        return formats

    def _quantized(
        self, plain: Linear, parts: Mapping[str, int], formats: Mapping[str, Format]
    ) -> QuantizedLinear:
        names = {part: self._stored_name(part) for part in parts}
        in_features = plain.weight.shape[1]
        windows = {
            part: self._window(f"{self._parent}.{part}", out_features, in_features)
            for part, out_features in parts.items()
        }
        return QuantizedLinear(plain, windows, formats, names=names, device=self.device)

    def _window(self, name: str, out_features: int, in_features: int) -> Window:
        """Return what a rank has of the projection `name`."""
        parts = parts_of(self.spec, name)
        return Window.of(out_features, in_features, parts, is_summed=name.endswith(SUMMED))

    def _stored_name(self, part: str) -> str:
        """Return the checkpoint's name of a projection beside or in the module."""
        return self._names.of(f"{self._parent}.{part}", self.prefix)


def _by_projection(formats: Mapping[str, Format], layout: ExpertTensors) -> dict[str, Format]:
    """Return the format of each projection of experts, by its name."""
    if layout == "gates and ups":
        (fmt,) = formats.values()
        return {"gate_up_proj": fmt, "down_proj": fmt}
    return {part.rpartition(".")[2]: fmt for part, fmt in formats.items()}
