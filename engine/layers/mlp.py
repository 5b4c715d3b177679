"""The MLP of a decoder layer."""

from __future__ import annotations

from torch import Tensor, nn

from engine.layers.scheme import Scheme
from kernels.cpu.activation import Activation


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with `size` features between."""

    def __init__(
        self, hidden_size: int, size: int, *, activation: Activation, bias: bool, scheme: Scheme
    ) -> None:
        super().__init__()
        self.gate_up_proj = scheme.gated_linear(hidden_size, size, activation=activation, bias=bias)
        self.down_proj = scheme.linear(size, {"down_proj": hidden_size}, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(x))
        return out
