"""Normalisation layers, alone and fused with the addition to the residual stream."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from engine.layers.linear.linear import parameter
from kernels.layer_norm import layer_norm, layer_norm_add
from kernels.rms_norm import rms_norm, rms_norm_add


class Norm(Protocol):
    """A normalisation over the last dimension."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of `x + residual`, and the sum."""


class RMSNorm(nn.Module):
    """RMS normalisation over the last dimension of size `size`.

    Args:
        unit_offset: Gemma's variant: scale by `1 + weight`, and round only after that.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        unit_offset: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype, device=device)
        self.eps = eps
        self.unit_offset = unit_offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of `x + residual`, and the sum."""
        return rms_norm_add(x, residual, self.weight, self.eps, unit_offset=self.unit_offset)


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimension of size `size`.

    Args:
        unit_offset: Nemotron's variant: scale by `1 + weight`, which is rounded.
        has_weight: without, the weight is 1.
        has_bias: without, the bias is 0.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        unit_offset: bool = False,
        has_weight: bool = True,
        has_bias: bool = True,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        if has_weight:
            self.weight = parameter(size, dtype=dtype, device=device)
        else:
            self.weight = nn.Buffer(torch.ones(size, dtype=dtype, device=device), persistent=False)
        self.bias = parameter(size, dtype=dtype, device=device) if has_bias else None
        self.eps = eps
        self.unit_offset = unit_offset

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self._scale(), self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of `x + residual`, and the sum."""
        return layer_norm_add(x, residual, self._scale(), self.bias, self.eps)

    def _scale(self) -> Tensor:
        return self.weight + 1 if self.unit_offset else self.weight
