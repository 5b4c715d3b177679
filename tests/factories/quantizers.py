"""Weights in the published layouts of quantised checkpoints, and what they stand for.

Steps, zeros and scales are drawn first. From them follow both the packed tensors and, without any
packing, the float weights: who reads the packed tensors wrongly gets others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Quantized(NamedTuple):
    """The tensors of a projection, by the last part of their names, and its weight."""

    tensors: dict[str, Tensor]
    weight: Tensor


Quantizer = Callable[[int, int, torch.Generator], Quantized]


def pack_words(values: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return int32 words of consecutive `values` along `dim`, the first in the lowest bits.

    Args:
        order: which of the values of a word is in its lowest bits, in the next ones ...
    """
    per_word = 32 // bits
    moved = values.movedim(dim, -1).to(torch.int64)
    groups = moved.reshape(*moved.shape[:-1], -1, per_word)
    words = torch.zeros(groups.shape[:-1], dtype=torch.int64)
    for index, value in enumerate(order or range(per_word)):
        words |= groups[..., value] << (bits * index)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def _grouped(
    rows: int, columns: int, bits: int, group_of: Tensor, draw: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return steps [N, K], zeros and scales [N, groups], and the weight; signs are balanced."""
    groups = int(group_of.max()) + 1
    steps = torch.randint(0, 2**bits, (rows, columns), generator=draw)
    zeros = torch.randint(2 ** (bits - 1) - 2, 2 ** (bits - 1) + 2, (rows, groups), generator=draw)
    usual = 0.6 * columns**-0.5 / 2 ** (bits - 2)  # as large as other weights
    scales = ((0.5 + torch.rand(rows, groups, generator=draw)) * usual).half().float()
    weight = (steps - zeros[:, group_of]) * scales[:, group_of]
    return steps, zeros, scales, weight


def awq(group_size: int) -> Quantizer:
    def quantize(rows: int, columns: int, draw: torch.Generator) -> Quantized:
        group_of = torch.arange(columns) // group_size
        steps, zeros, scales, weight = _grouped(rows, columns, 4, group_of, draw)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": pack_words(steps.t(), 4, 1, order),
            "qzeros": pack_words(zeros.t(), 4, 1, order),
            "scales": scales.t().half().contiguous(),
        }
        return Quantized(tensors, weight)

    return quantize


def gptq(bits: int, group_size: int, *, version: int, desc_act: bool) -> Quantizer:
    def quantize(rows: int, columns: int, draw: torch.Generator) -> Quantized:
        size = columns if group_size == -1 else group_size
        group_of = torch.arange(columns) // size
        if desc_act:
            group_of = group_of[torch.randperm(columns, generator=draw)]
        steps, zeros, scales, weight = _grouped(rows, columns, bits, group_of, draw)
        tensors = {
            "qweight": pack_words(steps.t(), bits, 0),
            "qzeros": pack_words(zeros.t() - int(version == 1), bits, 1),
            "scales": scales.t().half().contiguous(),
            "g_idx": group_of.int(),
        }
        return Quantized(tensors, weight)

    return quantize


def packed_groups(
    bits: int, group_size: int | None, *, has_index: bool = False, has_zeros: bool = False
) -> Quantizer:
    def quantize(rows: int, columns: int, draw: torch.Generator) -> Quantized:
        group_of = torch.arange(columns) // (group_size or columns)
        if has_index:
            group_of = group_of[torch.randperm(columns, generator=draw)]
        steps, zeros, scales, _ = _grouped(rows, columns, bits, group_of, draw)
        tensors = {
            "weight_packed": pack_words(steps, bits, 1),
            "weight_scale": scales.to(torch.bfloat16),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if has_index:
            tensors["weight_g_idx"] = group_of.int()
        if has_zeros:
            padded = torch.zeros(-rows % (32 // bits), zeros.shape[1], dtype=zeros.dtype)
            tensors["weight_zero_point"] = pack_words(torch.cat((zeros, padded)), bits, 0)
        else:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        scales = tensors["weight_scale"].float()
        return Quantized(tensors, (steps - zeros[:, group_of]) * scales[:, group_of])

    return quantize


def _scaled(
    weight: Tensor, scale: Tensor, scale_name: str, wide: Tensor, **more: Tensor
) -> Quantized:
    return Quantized({"weight": weight, scale_name: scale, **more}, weight.float() * wide)


def fp8(
    scale_name: str, scales: str, *, block: int = 0, input_scale_name: str | None = None
) -> Quantizer:
    """`scales`: one of `tensor`, `channel` and `block`."""

    def quantize(rows: int, columns: int, draw: torch.Generator) -> Quantized:
        weight = torch.randn(rows, columns, generator=draw).mul_(100).to(torch.float8_e4m3fn)
        shape = {
            "tensor": (1, 1),
            "channel": (rows, 1),
            "block": (-(-rows // (block or 1)), -(-columns // (block or 1))),
        }[scales]
        scale = (0.5 + torch.rand(shape, generator=draw)) * columns**-0.5 / 100
        wide = scale
        if scales == "block":
            wide = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        stored = scale.flatten()[0] if scales == "tensor" else scale
        more = {} if input_scale_name is None else {input_scale_name: torch.tensor(0.5)}
        return _scaled(weight, stored, scale_name, wide, **more)

    return quantize


def int8(*, per_channel: bool) -> Quantizer:
    def quantize(rows: int, columns: int, draw: torch.Generator) -> Quantized:
        weight = torch.randint(-127, 128, (rows, columns), generator=draw).to(torch.int8)
        shape = (rows, 1) if per_channel else (1,)
        scale = (0.5 + torch.rand(shape, generator=draw)) * columns**-0.5 / 70
        return _scaled(weight, scale, "weight_scale", scale)

    return quantize


def llm_int8(rows: int, columns: int, draw: torch.Generator) -> Quantized:
    weight = torch.randint(-127, 128, (rows, columns), generator=draw).to(torch.int8)
    largest = (0.5 + torch.rand(rows, generator=draw)) * 2 * columns**-0.5
    tensors = {
        "weight": weight,
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return Quantized(tensors, weight.double().div(127).mul(largest.double()[:, None]))


def bitsandbytes_4(kind: str, *, nested: bool) -> Quantizer:
    """`kind`: nf4 or fp4; `nested`: the scales are quantised too."""
    half = {"nf4": _NF4, "fp4": tuple(value / 12 for value in _FP4)}[kind]

    def quantize(rows: int, columns: int, draw: torch.Generator) -> Quantized:
        indices = torch.randint(0, 16, (rows * columns,), generator=draw)
        table = torch.tensor(half)
        state: dict[str, object] = {
            "quant_type": kind,
            "blocksize": 64,
            "dtype": "bfloat16",
            "shape": [rows, columns],
        }
        num_blocks = -(-rows * columns // 64)
        tensors = {
            "weight": (16 * indices[::2] + indices[1::2]).to(torch.uint8)[:, None],
            "weight.quant_map": table,
        }
        usual = 1.6 * columns**-0.5
        scales = (0.5 + torch.rand(num_blocks, generator=draw)) * usual
        if nested:
            steps = torch.randint(0, 256, (num_blocks,), generator=draw)
            nested_table = torch.linspace(-0.98, 1, 256)
            shared = (0.3 + 0.2 * torch.rand(-(-num_blocks // 256), generator=draw)) * usual
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": usual}
            scales = nested_table[steps] * shared[torch.arange(num_blocks) // 256] + usual
            tensors |= {
                "weight.absmax": steps.to(torch.uint8),
                "weight.nested_absmax": shared,
                "weight.nested_quant_map": nested_table,
            }
        else:
            tensors["weight.absmax"] = scales
        packed = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = packed
        weight = table[indices] * scales[torch.arange(rows * columns) // 64]
        return Quantized(tensors, weight.view(rows, columns))

    return quantize


# QLoRA's table, and the values of 1 sign bit, 2 bits of exponent and 1 of fraction.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)


def nvfp4(*, compressed: bool) -> Quantizer:
    """`compressed`: the layout of compressed-tensors; otherwise that of ModelOpt."""

    def quantize(rows: int, columns: int, draw: torch.Generator) -> Quantized:
        floats = torch.randint(0, 16, (rows, columns), generator=draw)
        scale = (20 + 400 * torch.rand(rows, columns // 16, generator=draw)).to(torch.float8_e4m3fn)
        shared = torch.tensor([columns**-0.5 / 800])
        weight = _e2m1(floats) * scale.float().repeat_interleave(16, 1) * shared
        packed = (floats[:, ::2] + 16 * floats[:, 1::2]).to(torch.uint8)
        if compressed:
            tensors = {
                "weight_packed": packed,
                "weight_scale": scale,
                "weight_global_scale": 1 / shared,
                "input_global_scale": torch.tensor([300.0]),
            }
        else:
            tensors = {
                "weight": packed,
                "weight_scale": scale,
                "weight_scale_2": shared[0],
                "input_scale": torch.tensor(0.002),
            }
        return Quantized(tensors, weight)

    return quantize


def mxfp4(rows: int, columns: int, draw: torch.Generator) -> Quantized:
    floats = torch.randint(0, 16, (rows, columns), generator=draw)
    shape = (rows, columns // 32)
    powers = torch.randint(-5, -2, shape, generator=draw) - int(columns**0.5).bit_length()
    weight = _e2m1(floats) * 2.0 ** powers.repeat_interleave(32, 1)
    tensors = {
        "blocks": (floats[:, ::2] + 16 * floats[:, 1::2]).to(torch.uint8).view(rows, -1, 16),
        "scales": (powers + 127).to(torch.uint8),
    }
    return Quantized(tensors, weight)


def _e2m1(floats: Tensor) -> Tensor:
    """Return the values of 4 bits: a sign, 2 bits of exponent and 1 of fraction."""
    sign, exponent, fraction = floats >> 3, (floats >> 1) & 3, floats & 1
    magnitude = torch.where(
        exponent == 0, fraction * 0.5, (1 + fraction * 0.5) * 2.0 ** (exponent - 1)
    )
    return (1 - 2 * sign) * magnitude
