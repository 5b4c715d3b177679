"""The gated MLP of the Llama family."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.linear import Linear
from kernels.gated_activation import silu_mul


class GatedLinear(Linear):
    """silu(gate(x)) * up(x), the two projections in one product."""

    def __init__(
        self, in_features: int, size: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        parts = {"gate_proj": size, "up_proj": size}
        super().__init__(in_features, parts, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return silu_mul(super().forward(x))


class Gated(nn.Module):
    """silu(gate) * up of what `projection` returns, a form of the projections of `GatedLinear`."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self._projection = projection

    def forward(self, x: Tensor) -> Tensor:
        return silu_mul(self._projection(x))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.gate_up_proj: nn.Module = GatedLinear(
            hidden_size, intermediate_size, bias=bias, dtype=dtype, device=device
        )
        self.down_proj: nn.Module = Linear(
            intermediate_size, {"down_proj": hidden_size}, bias=bias, dtype=dtype, device=device
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(x))
        return out
