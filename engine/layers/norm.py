"""RMSNorm layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.linear import parameter
from kernels.rms_norm import rms_norm, rms_norm_add


class RMSNorm(nn.Module):
    """RMS normalisation over the last dimension of size `size`."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of `x + residual`, and the sum."""
        return rms_norm_add(x, residual, self.weight, self.eps)
