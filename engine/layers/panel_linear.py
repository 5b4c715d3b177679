"""Projections on a CPU whose weights are packed in panels, as our own kernels read them."""

from __future__ import annotations

from torch import Tensor, nn

from engine.layers.int8_linear import Int8Weight, quantize_channels
from kernels.cpu.activation import Activation
from kernels.cpu.linear import gated_linear, interleave, linear, pack, pack_int8, pad_channels


class PanelLinear(nn.Module):
    """y = x W^T + b, or `activation(gate) * up` of what that returns.

    A row of y depends on its row of x alone, to the last bit.

    Args:
        weight: [out_features, in_features], with which `kernels.cpu.linear.runs`; or 8-bit
            integers, which stay as they are. It is copied.
        bias: [out_features] or None, of the type of the weight, as x is.
        int8: quantise the weight, with a scale per output channel. Each token's activations are
            quantised then too: the product is one of 8-bit integers (W8A8).
        activation: of the first half of the output, the gates; None for none. The halves must be
            ones that `kernels.cpu.linear.can_gate`.
        wide: return float32; without an activation only.
    """

    def __init__(
        self,
        weight: Tensor | Int8Weight,
        bias: Tensor | None,
        *,
        int8: bool = False,
        activation: Activation | None = None,
        wide: bool = False,
    ) -> None:
        super().__init__()
        assert activation is None or not wide, "activations are rounded"
        if int8 and isinstance(weight, Tensor):
            weight = quantize_channels(weight)
        parts = [weight] if isinstance(weight, Tensor) else list(weight)
        self._out_features = len(parts[0])
        self._activation = activation
        self._wide = wide
        if activation is not None:
            parts = [interleave(part) for part in parts]
            bias = None if bias is None else interleave(bias)
        self._bias = bias
        self._scale: Tensor | None = None
        if isinstance(weight, Int8Weight):
            self._weight = pack_int8(parts[0])
            self._scale = pad_channels(parts[1])
        else:
            self._weight = pack(parts[0])

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the product: `weight`, and `scale` and `bias` if it has them."""
        named = {"weight": self._weight, "scale": self._scale, "bias": self._bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def forward(self, x: Tensor) -> Tensor:
        if self._activation is None:
            return linear(
                x,
                self._weight,
                self._bias,
                out_features=self._out_features,
                scale=self._scale,
                wide=self._wide,
            )
        return gated_linear(
            x,
            self._weight,
            self._bias,
            size=self._out_features // 2,
            activation=self._activation,
            scale=self._scale,
        )
