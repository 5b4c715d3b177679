"""Int8Linear: a projection on a CPU whose weights and activations are 8-bit integers (W8A8).

Weights have a scale per output channel, activations one per token. oneDNN multiplies unsigned
activations by signed weights, so the activations are shifted by a zero point of 128, whose share of
the product it subtracts.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from engine.layers.integer_weight import Int8Weight

_LARGEST = 127
_ZERO_POINT = 128
# Of rows of zeros. Times the scale of activations a smaller one would be a denormal number, which
# makes a product of many such rows several times slower.
_LEAST_SCALE = 2.0**-96
# Weights quantised at once: few enough to stay in the processor's cache, and for PyTorch to run
# each operation on one thread, without waiting for others.
_CHUNK_ELEMENTS = 2**15 - 1


@cache
def multiplies_int8() -> bool:
    """Return whether oneDNN multiplies 8-bit integers without saturation on this machine.

    x86 does since VNNI. Before, pairs of products are summed in 16 bits, which overflow.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    size = 64
    gemm = Int8Gemm(torch.full((size, size), _LARGEST, dtype=torch.int8), torch.ones(size))
    x = torch.full((size, size), 255, dtype=torch.uint8)
    exact = (255 - _ZERO_POINT) * _LARGEST * size
    return bool((gemm(x, torch.float32) == exact).all())


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` [..., K] as uint8 with zero point 128, and the scale of each row.

    The scales are [..., 1], in the dtype of `x` and rounded to it before they are used; in float32
    for float16, which has no scales for small rows.
    """
    scale = x.abs().amax(-1, keepdim=True)
    scale = (scale.float() if x.dtype == torch.float16 else scale).mul_(1 / _LARGEST)
    scale.clamp_min_(torch.finfo(scale.dtype).tiny)  # of rows of zeros
    # Conversion to an integer truncates; adding 0.5 rounds. A scale that was rounded down, in
    # bfloat16 by up to 1 / 257, makes the largest step 127.497: below 256 with 128.5.
    half_up = x.new_full((), _ZERO_POINT + 0.5, dtype=torch.float32)
    steps = torch.addcmul(half_up, x.float(), scale.float().reciprocal())
    return steps.to(torch.uint8), scale


class Int8Linear(nn.Module):
    """y = x W^T + b, computed in 8-bit integers where `multiplies_int8`.

    Args:
        weight: [out_features, in_features], of any float type. It is quantised to a copy.
        bias: [out_features] or None, of the type of the activations.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._gemm = Int8Gemm(*quantize_channels(weight))
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        # In float16 the products would overflow before they are multiplied by the rows' scales.
        dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
        steps, scale = quantize_rows(x)
        out = self._gemm(steps, dtype)
        if self._bias is None:
            return out.mul_(scale).to(x.dtype)
        return torch.addcmul(self._bias, out, scale).to(x.dtype)


def quantize_channels(weight: Tensor) -> Int8Weight:
    """Return the nearest `Int8Weight` to `weight`, with steps of up to 127."""
    steps = torch.empty_like(weight, dtype=torch.int8)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    num_rows = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    for source, to, its_scale in zip(
        *(torch.split(tensor, num_rows) for tensor in (weight, steps, scale)), strict=True
    ):
        rows = source.to(torch.float32, copy=True)
        torch.amax(rows.abs(), 1, out=its_scale)
        its_scale.div_(_LARGEST).clamp_min_(_LEAST_SCALE)
        to.copy_(rows.div_(its_scale[:, None]).round_())
    return Int8Weight(steps, scale)


class Int8Gemm:
    """x W^T for uint8 x with zero point 128, and int8 weights with a scale per row."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self._weight = torch.ops.onednn.qlinear_prepack(weight, None)
        self._scale = scale
        self._zero_points = torch.zeros(len(scale), dtype=torch.int32)

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [..., out_features] in `dtype`, float32 or bfloat16."""
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            x,
            1.0,
            _ZERO_POINT,
            self._weight,
            self._scale,
            self._zero_points,
            None,
            1.0,
            0,
            dtype,
            "none",
            [],
            "",
        )
        return out
