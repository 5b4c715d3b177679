"""The MLP of a decoder layer."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from engine.layers.scheme import Scheme
from kernels.cpu.activation import Activation, plain_activation

# relu2 is the square of relu.
PlainActivation = Literal["relu", "relu2", "silu", "gelu", "gelu_tanh"]


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with `size` features between."""

    def __init__(
        self, hidden_size: int, size: int, *, activation: Activation, bias: bool, scheme: Scheme
    ) -> None:
        super().__init__()
        self.gate_up_proj = scheme.at("gate_up_proj").gated_linear(
            hidden_size, size, activation=activation, bias=bias
        )
        self.down_proj = scheme.at("down_proj").linear(size, {"down_proj": hidden_size}, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(x))
        return out


class PlainMLP(nn.Module):
    """down(activation(up(x))), with `size` features between."""

    def __init__(
        self,
        hidden_size: int,
        size: int,
        *,
        activation: PlainActivation,
        bias: bool,
        scheme: Scheme,
    ) -> None:
        super().__init__()
        self.up_proj = scheme.at("up_proj").linear(hidden_size, {"up_proj": size}, bias=bias)
        self.down_proj = scheme.at("down_proj").linear(size, {"down_proj": hidden_size}, bias=bias)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._activate(self.up_proj(x)))
        return out

    def _activate(self, up: Tensor) -> Tensor:
        if self._activation == "relu":
            return up.relu()
        if self._activation == "relu2":
            return up.relu().square()
        return plain_activation(up, self._activation)
