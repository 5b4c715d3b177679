"""Fp8Linear: a projection on a GPU whose weights and activations are FP8 (W8A8)."""

from __future__ import annotations

from torch import Tensor, nn

from engine.layers.stored_weight import Fp8Weight
from kernels.quantized.fp8_product import GROUP, fp8_linear
from kernels.quantized.rows import quantize_rows


class Fp8Linear(nn.Module):
    """y = x W^T + b, where the GPU multiplies FP8.

    Activations are quantised with a scale per token, or per 128 inputs of one if the weight has
    scales of blocks; or with the weight's own scale of activations, beyond which they saturate.

    Args:
        weight: It is not copied.
        bias: [out_features] or None, of the type of the activations, bfloat16 or float16.
        invariant: a row of y depends on its row of x alone, to the last bit.
    """

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, *, invariant: bool = False) -> None:
        super().__init__()
        self._weight = weight
        self._bias = bias
        self._invariant = invariant
        num_scales = weight.scale.shape[1]
        self._group = weight.codes.shape[1] if num_scales == 1 else GROUP

    def forward(self, x: Tensor) -> Tensor:
        codes, scales = quantize_rows(x.reshape(-1, self._group), self._weight.input_scale)
        return fp8_linear(
            codes.view(x.shape),
            scales.view(len(x), -1),
            self._weight.codes,
            self._weight.scale,
            self._bias,
            x.dtype,
            invariant=self._invariant,
        )
