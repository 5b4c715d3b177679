"""NVFP4: 4-bit floats (E2M1) in blocks of 16, each with a scale in E4M3, and one for all.

The layouts of ModelOpt, and of compressed-tensors' `nvfp4-pack-quantized`. Activations stay wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CheckpointError, UnsupportedError
from engine.layers.stored_weight import WNA16Weight
from engine.quantization.e2m1 import unpack_e2m1, unpack_nibbles
from engine.quantization.format import Axis, Format, Stored, num_bytes_of_codes

_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Nvfp4(Format):
    """Rows of bytes, the first float of each in its low bits.

    Attributes:
        weight_name, global_name, input_name: of the bytes, of the scale for all, and of that of the
            activations, which is not used here; None: there is none.
        divides: what the scales of blocks stand for is to be divided by the one for all.
    """

    weight_name: str
    global_name: str
    input_name: str | None
    divides: bool

    @property
    def label(self) -> str:
        return "nvfp4"

    def tensors(self, out_features: int, in_features: int) -> dict[str, Stored]:
        if in_features % _BLOCK:
            raise UnsupportedError(
                f"in_features {in_features} is not a multiple of the block size {_BLOCK} of nvfp4",
                param="quantization_config",
            )
        shape, scales = (out_features, in_features // 2), (out_features, in_features // _BLOCK)
        stored = {
            self.weight_name: Stored(shape, torch.uint8, Axis(0), Axis(1, 2)),
            "weight_scale": Stored(scales, torch.float8_e4m3fn, Axis(0), Axis(1, _BLOCK)),
            self.global_name: Stored((1,), torch.float32),
        }
        if self.input_name is not None:
            stored[self.input_name] = Stored((1,), torch.float32)
        return stored

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        scale, shared = self._scales(tensors), tensors[self.global_name]
        scale = scale / shared if self.divides else scale * shared
        return unpack_e2m1(tensors[self.weight_name]) * scale.repeat_interleave(_BLOCK, 1)

    def stays_on_gpu(self, out_features: int, in_features: int) -> bool:
        return True

    def num_bytes_on_gpu(self, out_features: int, in_features: int) -> int:
        factors = 4 * out_features
        return factors + num_bytes_of_codes(out_features, in_features, 4, _BLOCK, scale=1)

    def for_gpu(self, tensors: Mapping[str, Tensor]) -> WNA16Weight:
        steps, shared = unpack_nibbles(tensors[self.weight_name]), tensors[self.global_name]
        factor = (shared.reciprocal() if self.divides else shared).expand(len(steps))
        return WNA16Weight(steps, "e2m1", self._scales(tensors), factor=factor)

    def _scales(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the scales of blocks, float32 [N, blocks], without the one for all."""
        # Scales of 0 are what becomes of those of blocks that are small beside the largest.
        scale = tensors["weight_scale"].float()
        if not bool((scale >= 0).all()):
            raise CheckpointError("a scale is negative or NaN", param="weight_scale")
        return scale
