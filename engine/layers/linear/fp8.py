"""Projections on a GPU whose weights and activations are FP8 (W8A8)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.layers.norm import RMSNorm
from engine.layers.stored_weight import Fp8Weight
from kernels.cpu.activation import Activation
from kernels.quantized.fp8_gemm import GROUP, fp8_linear
from kernels.quantized.gated_rows import gated_rows
from kernels.quantized.normed_rows import normed_rows
from kernels.quantized.rows import quantize_rows


class Fp8Rows(NamedTuple):
    """Activations in FP8, as the product that they are for takes them.

    Attributes:
        codes: float8_e4m3fn [T, K].
        scales: float32 [T, 1], or [T, K / 128].
        dtype: in which they were computed.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype


class Fp8Linear(nn.Module):
    """y = x W^T + b, where the GPU multiplies FP8.

    Activations are quantised with a scale per token, or per 128 inputs of one if the weight has
    scales of blocks; or with the weight's own scale of activations, beyond which they saturate.

    Attributes:
        input_scale: that scale, or None.
        group: inputs that share a scale; None: all.

    Args:
        weight: It is not copied.
        bias: [out_features] or None, of the type of the activations, bfloat16 or float16.
        invariant: a row of y depends on its row of x alone, to the last bit.
    """

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, *, invariant: bool = False) -> None:
        super().__init__()
        self.input_scale = weight.input_scale
        self.group = GROUP if weight.scale.shape[1] > 1 else None
        self._weight = weight
        self._bias = bias
        self._invariant = invariant

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        rows = self._rows(x) if isinstance(x, Tensor) else x
        return fp8_linear(
            rows.codes,
            rows.scales,
            self._weight.codes,
            self._weight.scale,
            self._bias,
            rows.dtype,
            invariant=self._invariant,
        )

    def _rows(self, x: Tensor) -> Fp8Rows:
        num_rows, depth = x.shape
        group = self.group or depth
        codes, scales = quantize_rows(x.reshape(-1, group), self.input_scale)
        return Fp8Rows(codes.view(x.shape), scales.view(num_rows, depth // group), x.dtype)


class Fp8Gated(nn.Module):
    """activation(gate) * up of what `projection` returns, quantised for the product `down`."""

    def __init__(self, projection: nn.Module, activation: Activation, down: Fp8Linear) -> None:
        super().__init__()
        self._projection = projection
        self._activation = activation
        self._group, self._scale = down.group, down.input_scale

    @property
    def projection(self) -> nn.Module:
        """What computes gates and ups."""
        return self._projection

    def forward(self, x: Tensor | Fp8Rows) -> Fp8Rows:
        gate_up: Tensor = self._projection(x)
        codes, scales = gated_rows(gate_up, self._activation, group=self._group, scale=self._scale)
        return Fp8Rows(codes, scales, gate_up.dtype)


class Fp8Norm(nn.Module):
    """What `norm` does, quantised for the product `following`."""

    def __init__(self, norm: RMSNorm, following: Fp8Linear) -> None:
        super().__init__()
        self._norm = norm
        self._group, self._scale = following.group, following.input_scale

    def forward(self, x: Tensor) -> Fp8Rows:
        return self._quantized(x, None)[0]

    def add(self, x: Tensor, residual: Tensor) -> tuple[Fp8Rows, Tensor]:
        """Return the norm of `x + residual`, and the sum."""
        return self._quantized(x, residual)

    def _quantized(self, x: Tensor, residual: Tensor | None) -> tuple[Fp8Rows, Tensor]:
        norm = self._norm
        codes, scales, total = normed_rows(
            x,
            residual,
            norm.weight,
            norm.eps,
            unit_offset=norm.unit_offset,
            group=self._group,
            scale=self._scale,
        )
        return Fp8Rows(codes, scales, x.dtype), total
