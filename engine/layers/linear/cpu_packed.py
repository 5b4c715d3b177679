"""Projections on a CPU whose weights are packed in panels, as our own kernels read them."""

from __future__ import annotations

from torch import Tensor, nn

from engine.layers.integer_weight import GroupedWeight, Int8Weight, IntegerWeight
from engine.layers.linear.int8 import quantize_channels
from kernels.cpu.activation import Activation
from kernels.cpu.large_pages import LargePages
from kernels.cpu.linear import (
    gated_linear,
    interleave,
    linear,
    pack,
    pack_int4,
    pack_int8,
    pack_uint8,
    pad_channels,
    pad_groups,
)


class CpuPackedLinear(nn.Module):
    """y = x W^T + b, or `activation(gate) * up` of what that returns.

    A row of y depends on its row of x alone, to the last bit; of weights in groups, if `invariant`.

    Args:
        weight: [out_features, in_features], with which `kernels.cpu.linear.runs`; or integers,
            which stay as they are, in groups of a multiple of `kernels.cpu.linear.GROUP` inputs.
            It is copied.
        bias: [out_features] or None, of the type of the weight, as x is.
        int8: quantise the weight, with a scale per output channel. Each token's activations are
            quantised then too: the product is one of 8-bit integers (W8A8).
        activation: of the first half of the output, the gates; None for none. The halves must be
            ones that `kernels.cpu.linear.can_gate`.
        wide: return float32; without an activation only.
        invariant: as in `kernels.cpu.linear`.
    """

    def __init__(
        self,
        weight: Tensor | IntegerWeight,
        bias: Tensor | None,
        *,
        int8: bool = False,
        activation: Activation | None = None,
        wide: bool = False,
        invariant: bool = False,
    ) -> None:
        super().__init__()
        assert activation is None or not wide, "activations are rounded"
        if int8 and isinstance(weight, Tensor):
            weight = quantize_channels(weight)
        parts = [weight] if isinstance(weight, Tensor) else [*weight[:3]]
        parts = [part for part in parts if part is not None]
        self._out_features = len(parts[0])
        self._activation = activation
        self._wide = wide
        self._invariant = invariant
        if activation is not None:
            parts = [interleave(part) for part in parts]
            bias = None if bias is None else interleave(bias)
        self._bias = bias
        self._scale: Tensor | None = None
        self._offset: Tensor | None = None
        if isinstance(weight, Int8Weight):
            self._weight = pack_int8(parts[0])
            self._scale = pad_channels(parts[1])
        elif isinstance(weight, GroupedWeight):
            self._weight = (pack_int4 if weight.bits == 4 else pack_uint8)(parts[0])
            self._scale = pad_groups(parts[1])
            self._offset = None if weight.offset is None else pad_groups(parts[2])
        else:
            self._weight = pack(parts[0])

    def move(self, pages: LargePages) -> None:
        """Move the weight to large pages."""
        self._weight = pages.copy(self._weight)
        self._scale = None if self._scale is None else pages.copy(self._scale)
        self._offset = None if self._offset is None else pages.copy(self._offset)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the product: `weight`, and of the others those that it has."""
        named = {
            "weight": self._weight,
            "scale": self._scale,
            "offset": self._offset,
            "bias": self._bias,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def forward(self, x: Tensor) -> Tensor:
        if self._activation is None:
            return linear(
                x,
                self._weight,
                self._bias,
                out_features=self._out_features,
                scale=self._scale,
                offset=self._offset,
                wide=self._wide,
                invariant=self._invariant,
            )
        return gated_linear(
            x,
            self._weight,
            self._bias,
            size=self._out_features // 2,
            activation=self._activation,
            scale=self._scale,
            offset=self._offset,
            invariant=self._invariant,
        )
