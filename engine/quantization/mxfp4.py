"""MXFP4: 4-bit floats (E2M1) in blocks of 32 that share a power of 2 (OCP Microscaling, 2023).

gpt-oss stores the experts of each layer so, all in one tensor of two floats to a byte, and nothing
else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CheckpointError, UnsupportedError
from engine.fields import Fields
from engine.layers.stored_weight import WNA16Weight
from engine.quantization.e2m1 import unpack_e2m1, unpack_nibbles
from engine.quantization.format import Axis, Format, Stored, num_bytes_of_codes

_BLOCK = 32
_EXPONENT_BIAS = 127
_NAN = 255


@dataclass(frozen=True, slots=True)
class Mxfp4(Format):
    """Blocks of 16 bytes, the first float of each in the low bits, and their exponents."""

    @property
    def label(self) -> str:
        return "mxfp4"

    @property
    def is_of_experts(self) -> bool:
        return True

    def tensors(self, out_features: int, in_features: int) -> dict[str, Stored]:
        if in_features % _BLOCK:
            raise UnsupportedError(
                f"in_features {in_features} is not a multiple of the block size {_BLOCK} of mxfp4",
                param="quantization_config",
            )
        scales = (out_features, in_features // _BLOCK)
        axes = (Axis(0), Axis(1, _BLOCK))
        return {
            "blocks": Stored((*scales, _BLOCK // 2), torch.uint8, *axes),
            "scales": Stored(scales, torch.uint8, *axes),
        }

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        values = unpack_e2m1(tensors["blocks"]).flatten(1)
        return torch.ldexp(values, _exponents(tensors["scales"]).repeat_interleave(_BLOCK, 1))

    def stays_on_gpu(self, out_features: int, in_features: int) -> bool:
        return True

    def num_bytes_on_gpu(self, out_features: int, in_features: int) -> int:
        return num_bytes_of_codes(out_features, in_features, 4, _BLOCK, scale=1)

    def for_gpu(self, tensors: Mapping[str, Tensor]) -> WNA16Weight:
        return e2m1_weight(unpack_nibbles(tensors["blocks"]).flatten(1), tensors["scales"])


def e2m1_weight(codes: Tensor, scales: Tensor) -> WNA16Weight:
    """Return the weight of codes, uint8 [N, K], with an exponent for 32 each, uint8 [N, K / 32].

    Raises:
        ValueError: one of the `scales` is NaN.
    """
    # 2^-127 has no normal float32; what it is of is 0 beside any other weight, twice as well.
    exponents = _exponents(scales).clamp_min(1 - _EXPONENT_BIAS)
    scale = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return WNA16Weight(codes, "e2m1", scale)


def _exponents(scales: Tensor) -> Tensor:
    if bool((scales == _NAN).any()):
        raise CheckpointError("one is NaN", param="scales")
    return scales.to(torch.int32) - _EXPONENT_BIAS


def parse_mxfp4(_config: Fields) -> Mxfp4:
    """Read a `quantization_config` whose method is mxfp4, which has no variants."""
    return Mxfp4()
