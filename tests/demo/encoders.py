"""Weights in the formats of quantised checkpoints, rounded to the nearest: no data is looked at."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import gguf
import torch
from torch import Tensor

from engine.layers.linear.int8 import quantize_channels
from engine.quantization.bitsandbytes import LlmInt8
from engine.quantization.bitsandbytes4 import FourBit
from engine.quantization.compressed_tensors import Int8Channels, PackedGroups
from engine.quantization.format import Format
from engine.quantization.fp8 import Fp8
from engine.quantization.gguf import GgufBlocks
from engine.quantization.nvfp4 import Nvfp4

_LARGEST_E4M3 = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class Encoded(NamedTuple):
    """A weight in a format: the tensors that it asks for."""

    format: Format
    tensors: dict[str, Tensor]

    def decoded(self) -> Tensor:
        """Return the weight in float32 that the tensors stand for."""
        return self.format.dequantize(self.tensors)


Encoder = Callable[[Tensor], Encoded]


def _blocks(type_name: str, weight: Tensor) -> Encoded:
    kind = gguf.GGMLQuantizationType[type_name]
    blocks = gguf.quants.quantize(weight.numpy(), kind)
    return Encoded(GgufBlocks(type_name), {"weight": torch.from_numpy(blocks)})


def _channels(weight: Tensor) -> Encoded:
    steps, scale = quantize_channels(weight)
    tensors = {"weight": steps, "weight_scale": scale[:, None]}
    return Encoded(Int8Channels(per_channel=True, has_input_scale=False), tensors)


def _llm_int8(weight: Tensor) -> Encoded:
    steps, scale = quantize_channels(weight)
    rows = torch.tensor(0, dtype=torch.uint8)
    return Encoded(LlmInt8(), {"weight": steps, "SCB": scale * 127, "weight_format": rows})


def _groups(bits: int, size: int, has_zeros: bool, weight: Tensor) -> Encoded:
    """Round to integers in groups of `size`, with a zero for each or symmetrically."""
    fmt = PackedGroups(bits, size, has_group_index=False, has_zeros=has_zeros)
    largest = 2**bits - 1
    groups = _in_groups(weight, size)
    if has_zeros:
        least = groups.amin(-1, keepdim=True).clamp_max(0)
        scale = (groups.amax(-1, keepdim=True).clamp_min(0) - least) / largest
        zeros = (-least / scale).round()
    else:
        scale = groups.abs().amax(-1, keepdim=True) / (largest / 2)
        zeros = torch.full_like(scale, 2 ** (bits - 1))
    steps = (groups / scale + zeros).round().clamp(0, largest)
    tensors = {
        "weight_packed": _words(steps.flatten(1), bits),
        "weight_scale": scale.squeeze(-1),
        "weight_shape": torch.tensor(weight.shape),
    }
    if has_zeros:
        tensors["weight_zero_point"] = _words(zeros.squeeze(-1).t(), bits).t()
    return Encoded(fmt, tensors)


def _fp8(block: int | None, weight: Tensor) -> Encoded:
    """Round to E4M3 with a scale per output channel, or per square of `block`."""
    if block is None:
        scale = weight.abs().amax(1, keepdim=True) / _LARGEST_E4M3
        tensors = {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
        return Encoded(Fp8("weight_scale", per_channel=True), tensors)
    rows, columns = (-(-size // block) for size in weight.shape)
    padded = weight.new_zeros(rows * block, columns * block)
    padded[: len(weight), : weight.shape[1]] = weight
    squares = padded.view(rows, block, columns, block)
    scale = squares.abs().amax((1, 3), keepdim=True) / _LARGEST_E4M3
    scaled = (squares / scale).view(padded.shape)[: len(weight), : weight.shape[1]]
    tensors = {
        "weight": scaled.to(torch.float8_e4m3fn),
        "weight_scale_inv": scale.view(rows, columns),
    }
    return Encoded(Fp8("weight_scale_inv", block=(block, block)), tensors)


def _nf4(weight: Tensor) -> Encoded:
    groups = _in_groups(weight.view(1, -1), 64)
    largest = groups.abs().amax(-1, keepdim=True)
    indices = _nearest(groups / largest, _NF4).flatten()
    name = "weight.quant_state.bitsandbytes__nf4"
    fields = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
    state = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)
    fmt = FourBit(name, len(state), tuple(weight.shape), block=64, nested_block=None, offset=0.0)
    tensors = {
        "weight": (indices[::2] << 4 | indices[1::2])[:, None],
        "weight.absmax": largest.flatten(),
        "weight.quant_map": torch.tensor(_NF4),
        name: state,
    }
    return Encoded(fmt, tensors)


def _nvfp4(weight: Tensor) -> Encoded:
    shared = weight.abs().amax() / (_E2M1[-1] * _LARGEST_E4M3)
    groups = _in_groups(weight, 16)
    scale = groups.abs().amax(-1, keepdim=True) / _E2M1[-1] / shared
    scale = scale.to(torch.float8_e4m3fn)
    floats = groups / (scale.float() * shared)
    indices = (_nearest(floats.abs(), _E2M1) | (floats < 0).to(torch.uint8) << 3).flatten(1)
    tensors = {
        "weight_packed": indices[:, ::2] | indices[:, 1::2] << 4,
        "weight_scale": scale.squeeze(-1),
        "weight_global_scale": 1 / shared.view(1),
    }
    return Encoded(Nvfp4("weight_packed", "weight_global_scale", None, divides=True), tensors)


def _in_groups(weight: Tensor, size: int) -> Tensor:
    return weight.view(len(weight), -1, size)


def _nearest(values: Tensor, table: tuple[float, ...]) -> Tensor:
    """Return the indices, uint8, of the nearest of `table`, which ascends."""
    ascending = torch.tensor(table)
    return torch.bucketize(values, (ascending[1:] + ascending[:-1]) / 2).to(torch.uint8)


def _words(values: Tensor, bits: int) -> Tensor:
    """Return int32 words of unsigned integers along rows, the first in the lowest bits."""
    per_word = 32 // bits
    rows, columns = values.shape
    padded = values.new_zeros(rows, -(-columns // per_word) * per_word, dtype=torch.int64)
    padded[:, :columns] = values
    shifts = torch.arange(0, 32, bits)
    words = (padded.view(rows, -1, per_word) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _compressed(layout: str, **weights: object) -> dict[str, object]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


class Named(NamedTuple):
    """An encoder, and the `quantization_config` of checkpoints of its format; None: GGUF."""

    encode: Encoder
    config: dict[str, object] | None


_INTS = {"type": "int", "strategy": "group", "group_size": 128}
_GGUF = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")

ENCODERS: dict[str, Named] = {
    "int8 per channel (compressed-tensors)": Named(
        _channels, _compressed("int-quantized", type="int", num_bits=8, strategy="channel")
    ),
    "LLM.int8": Named(_llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "8 bits in groups of 128 (GPTQ, pack-quantized)": Named(
        partial(_groups, 8, 128, False), _compressed("pack-quantized", num_bits=8, **_INTS)
    ),
    "4 bits in groups of 128 (pack-quantized)": Named(
        partial(_groups, 4, 128, False), _compressed("pack-quantized", num_bits=4, **_INTS)
    ),
    "4 bits in groups of 128, zeros (AWQ, GPTQ)": Named(
        partial(_groups, 4, 128, True),
        _compressed("pack-quantized", num_bits=4, symmetric=False, **_INTS),
    ),
    "FP8 per channel": Named(
        partial(_fp8, None),
        _compressed("float-quantized", type="float", num_bits=8, strategy="channel"),
    ),
    "FP8 per block of 128": Named(
        partial(_fp8, 128), {"quant_method": "fp8", "weight_block_size": [128, 128]}
    ),
    "NF4": Named(_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "NVFP4": Named(
        _nvfp4,
        _compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group"),
    ),
    **{name: Named(partial(_blocks, name), None) for name in _GGUF},
}
