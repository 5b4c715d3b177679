"""FP8 weights (E4M3): with a scale for all, for each output channel, or for each block.

The layouts of `quant_method` fp8 (DeepSeek, Qwen: blocks; AutoFP8: one scale) and of
compressed-tensors' `float-quantized`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.fields import Fields
from engine.layers.stored_weight import Fp8Weight, WNA16Weight, of_blocks
from engine.quantization.format import Axis, Format, Stored
from kernels.quantized.codes import can_pack


@dataclass(frozen=True, slots=True)
class Fp8(Format):
    """FP8 with the scales in the tensor `scale_name`.

    Attributes:
        block: rows and columns that share a scale; None: `per_channel` decides.
        per_channel: a scale per output channel, not one for all.
        input_scale_name: of the static scale of activations, which is for products of FP8 alone;
            None: there is none.
    """

    scale_name: str
    block: tuple[int, int] | None = None
    per_channel: bool = False
    input_scale_name: str | None = None

    @property
    def label(self) -> str:
        return "fp8"

    def tensors(self, out_features: int, in_features: int) -> dict[str, Stored]:
        scales = Stored((1,), torch.float32)
        if self.per_channel:
            scales = Stored((out_features, 1), torch.float32, Axis(0))
        if self.block is not None:
            shape = (-(-out_features // self.block[0]), -(-in_features // self.block[1]))
            rows, columns = (Axis(dim, size) for dim, size in enumerate(self.block))
            scales = Stored(shape, torch.float32, rows, columns)
        shape = (out_features, in_features)
        stored = {
            "weight": Stored(shape, torch.float8_e4m3fn, Axis(0), Axis(1)),
            self.scale_name: scales,
        }
        if self.input_scale_name is not None:
            stored[self.input_scale_name] = Stored((1,), torch.float32)
        return stored

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        weight, scale = tensors["weight"].float(), tensors[self.scale_name]
        if self.block is not None:
            rows, columns = weight.shape
            scale = scale.repeat_interleave(self.block[0], 0)[:rows]
            scale = scale.repeat_interleave(self.block[1], 1)[:, :columns]
        return weight * scale

    def stays_on_gpu(self, out_features: int, in_features: int) -> bool:
        columns = in_features if self.block is None else self.block[1]
        return can_pack(columns) and in_features % columns == 0

    def num_bytes_on_gpu(self, out_features: int, in_features: int) -> int:
        rows, columns = (1, in_features) if self.block is None else self.block
        scales = out_features // math.gcd(out_features, rows) * (in_features // columns)
        return out_features * in_features + 4 * (scales + (self.input_scale_name is not None))

    def for_gpu(self, tensors: Mapping[str, Tensor]) -> Fp8Weight | WNA16Weight:
        weight, scale = tensors["weight"], tensors[self.scale_name]
        if self.block is not None:
            return of_blocks(weight, scale, self.block[0])
        of_rows = scale.expand(len(weight), 1) if not self.per_channel else scale
        input_scale = None if self.input_scale_name is None else tensors[self.input_scale_name]
        return Fp8Weight(weight, of_rows.contiguous(), input_scale)


def named_as_stored(fmt: Fp8, names: Collection[str]) -> Fp8:
    """Return `fmt` with the names that a checkpoint with tensors of these `names` has.

    AutoFP8 and transformers (Ministral 3) call a scale for all, and that of activations, otherwise.
    """
    name = "weight_scale_inv"
    if fmt.scale_name == name or not any(each.endswith(f".{name}") for each in names):
        return fmt
    is_static = fmt.input_scale_name is not None
    return replace(fmt, scale_name=name, input_scale_name="activation_scale" if is_static else None)


def parse_fp8(config: Fields) -> Fp8:
    """Read a `quantization_config` whose method is fp8."""
    block = config.integers("weight_block_size")
    activation = config.text("activation_scheme", default="dynamic")
    if activation not in ("dynamic", "static"):
        raise config.unsupported("activation_scheme", f"{activation!r} is not supported")
    if not block:
        return Fp8(
            "weight_scale", input_scale_name="input_scale" if activation == "static" else None
        )
    if len(block) != 2 or min(block) < 1:
        raise config.error("weight_block_size", "must be two integers above 0")
    if activation == "static":
        raise config.unsupported("activation_scheme", "static is not supported with blocks")
    return Fp8("weight_scale_inv", block=(block[0], block[1]))
