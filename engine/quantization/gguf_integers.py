"""The integers of GGUF's blocks, for products of them.

The layouts: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.checkpoint.gguf.blocks import dequantize_blocks
from engine.checkpoint.gguf.reader import block_size
from engine.layers.integer_weight import GroupedWeight, IntegerKind, round_to_8_bits

_GROUP = 32  # inputs


class _Groups(NamedTuple):
    """Integers [..., groups, 32] of blocks, and the scale and offset [..., groups] of groups.

    Without an offset the middle of the integers stands for 0.
    """

    steps: Tensor
    scale: Tensor
    offset: Tensor | None


def integer_kind(type_name: str) -> IntegerKind | None:
    """Return what `grouped_weight` makes of blocks of a type; None: it has floats."""
    if block_size(type_name)[0] == 1:
        return None
    bits, _ = _READERS.get(type_name, (8, None))
    return IntegerKind(bits, _GROUP)


def grouped_weight(blocks: Tensor, type_name: str) -> GroupedWeight:
    """Return the weight that rows of blocks stand for, of a type that has an `integer_kind`.

    Integers in groups of other than 32 inputs, or not in even steps, are rounded to 8 bits.

    Args:
        blocks: uint8 [N, bytes of a row]
    """
    if type_name not in _READERS:
        return round_to_8_bits(dequantize_blocks(blocks, type_name), _GROUP)
    bits, read = _READERS[type_name]
    steps, scale, offset = read(blocks.view(len(blocks), -1, block_size(type_name)[1]))
    offset = None if offset is None else offset.flatten(1)
    return GroupedWeight(steps.to(torch.uint8).flatten(1), scale.flatten(1), offset, bits)


def _q4_0(blocks: Tensor) -> _Groups:
    return _groups(_halves(blocks[..., 2:]), _floats(blocks, 0), None)


def _q4_1(blocks: Tensor) -> _Groups:
    return _groups(_halves(blocks[..., 4:]), _floats(blocks, 0), _floats(blocks, 2))


def _q5_0(blocks: Tensor) -> _Groups:
    steps = _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return _groups(steps + (128 - 16), _floats(blocks, 0), None)


def _q5_1(blocks: Tensor) -> _Groups:
    steps = _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return _groups(steps, _floats(blocks, 0), _floats(blocks, 2))


def _q8_0(blocks: Tensor) -> _Groups:
    # Flipping the sign bit adds 128.
    return _groups(blocks[..., 2:] ^ 128, _floats(blocks, 0), None)


def _q4_k(blocks: Tensor) -> _Groups:
    return _k_groups(blocks, _k_nibbles(blocks[..., 16:]))


def _q5_k(blocks: Tensor) -> _Groups:
    # A byte has a bit of an input in each group.
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = blocks[..., None, 16:48] >> shifts[:, None] & 1
    return _k_groups(blocks, _k_nibbles(blocks[..., 48:]) | high << 4)


def _groups(steps: Tensor, scale: Tensor, offset: Tensor | None) -> _Groups:
    return _Groups(steps.unsqueeze(-2), scale, offset)


def _k_groups(blocks: Tensor, steps: Tensor) -> _Groups:
    """Return the 8 groups of a K block, whose scales and minima have 6 bits each."""
    low, mid, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minima = torch.cat((mid & 63, high >> 4 | mid >> 6 << 4), -1)
    return _Groups(steps, _floats(blocks, 0) * scales, -_floats(blocks, 2) * minima)


def _k_nibbles(stored: Tensor) -> Tensor:
    """Return [..., 8, 32] of [..., 128] bytes: the groups in turn are low and high halves."""
    runs = stored.unflatten(-1, (4, 1, 32))  # type: ignore[no-untyped-call]
    nibbles: Tensor = torch.cat((runs & 15, runs >> 4), -2).flatten(-3, -2)
    return nibbles


def _halves(stored: Tensor) -> Tensor:
    """Return [..., 32] of [..., 16] bytes: the low halves, then the high ones."""
    return torch.cat((stored & 15, stored >> 4), -1)


def _bits(stored: Tensor) -> Tensor:
    """Return the bits of [..., 4] bytes, [..., 32], the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=stored.device)
    return (stored[..., None] >> shifts & 1).flatten(-2)


def _floats(blocks: Tensor, offset: int) -> Tensor:
    """Return the float16 at byte `offset` of each block, [..., 1] of float32."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).float()


_READERS: dict[str, tuple[int, Callable[[Tensor], _Groups]]] = {
    "Q4_0": (4, _q4_0),
    "Q4_1": (4, _q4_1),
    "Q4_K": (4, _q4_k),
    "Q5_0": (8, _q5_0),
    "Q5_1": (8, _q5_1),
    "Q5_K": (8, _q5_k),
    "Q8_0": (8, _q8_0),
}
