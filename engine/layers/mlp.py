"""The gated MLP of the Llama family."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.linear import Linear
from engine.models.config import ModelConfig
from kernels.gated_activation import silu_mul


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up in one product."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj: nn.Module = Linear(hidden, parts, bias=bias, dtype=dtype, device=device)
        parts = {"down_proj": hidden}
        self.down_proj: nn.Module = Linear(inner, parts, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return out
