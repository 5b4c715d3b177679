"""LLM.int8 (Dettmers et al., 2022): 8-bit integers with the largest weight of each output channel.

The layout of bitsandbytes with `load_in_8bit`; 4 bits are in `bitsandbytes4.py`. Activations are
not quantised here: what the method does with the large ones among them, our products of 8-bit
integers do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.fields import Fields
from engine.layers.integer_weight import Int8Weight
from engine.layers.stored_weight import WNA16Weight, of_integers
from engine.quantization.format import Axis, Format, Stored, num_bytes_of_codes
from kernels.quantized.codes import can_pack

_LARGEST = 127  # the integer that stands for the largest weight of a channel
_ROWS = 0  # the layout of the integers that checkpoints have


@dataclass(frozen=True, slots=True)
class LlmInt8(Format):
    """Rows of integers, and what the largest of each stands for."""

    @property
    def label(self) -> str:
        return "bitsandbytes, int8"

    @property
    def may_be_zero(self) -> frozenset[str]:
        return frozenset({"SCB"})  # of channels of zeros

    def tensors(self, out_features: int, in_features: int) -> dict[str, Stored]:
        return {
            "weight": Stored((out_features, in_features), torch.int8, Axis(0), Axis(1)),
            "SCB": Stored((out_features,), torch.float32, Axis(0)),
            "weight_format": Stored((), torch.uint8),
        }

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        weight = self._weight(tensors)
        return weight.steps * weight.scale[:, None]

    def stays_on_gpu(self, out_features: int, in_features: int) -> bool:
        return can_pack(in_features)

    def num_bytes_on_gpu(self, out_features: int, in_features: int) -> int:
        return num_bytes_of_codes(out_features, in_features, 8, in_features)

    def for_gpu(self, tensors: Mapping[str, Tensor]) -> WNA16Weight:
        return of_integers(self._weight(tensors))

    def _weight(self, tensors: Mapping[str, Tensor]) -> Int8Weight:
        if int(tensors["weight_format"]) != _ROWS:
            raise CheckpointError(f"must be {_ROWS}, which means row-major", param="weight_format")
        return Int8Weight(tensors["weight"], tensors["SCB"] / _LARGEST)


def parse_bitsandbytes(config: Fields) -> LlmInt8:
    """Read a `quantization_config` whose method is bitsandbytes, and which is not of 4 bits."""
    if not config.boolean("load_in_8bit", default=False):
        raise config.error("load_in_8bit", "must be true, unless load_in_4bit is")
    return LlmInt8()
