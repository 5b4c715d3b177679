"""Projections on a CPU whose weights are packed in panels, as our own kernels read them."""

from __future__ import annotations

from torch import Tensor, nn

from engine.layers.int8_linear import quantize_channels
from kernels.cpu.activation import Activation
from kernels.cpu.linear import gated_linear, interleave, linear, pack, pack_int8, pad_channels


class PanelLinear(nn.Module):
    """y = x W^T + b, or `activation(gate) * up` of what that returns.

    A row of y depends on its row of x alone, to the last bit.

    Args:
        weight: [out_features, in_features], with which `kernels.cpu.linear.runs`. It is copied.
        bias: [out_features] or None, of the type of the weight, as x is.
        int8: quantise the weight, with a scale per output channel, and each token's activations:
            the product is one of 8-bit integers (W8A8).
        activation: of the first half of the output, the gates; None for none. The halves must be
            ones that `kernels.cpu.linear.can_gate`.
        wide: return float32; without an activation only.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        int8: bool = False,
        activation: Activation | None = None,
        wide: bool = False,
    ) -> None:
        super().__init__()
        assert activation is None or not wide, "activations are rounded"
        self._out_features = len(weight)
        self._activation = activation
        self._wide = wide
        if activation is not None:
            weight = interleave(weight)
            bias = None if bias is None else interleave(bias)
        self._bias = bias
        self._scale: Tensor | None = None
        if int8:
            steps, scale = quantize_channels(weight)
            self._weight = pack_int8(steps)
            self._scale = pad_channels(scale)
        else:
            self._weight = pack(weight)

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
