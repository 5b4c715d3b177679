"""Experts on a CPU whose weights are packed in panels, as our own kernels read them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from engine.layers.experts import Experts
from engine.layers.linear.int8 import quantize_channels
from kernels.cpu.experts import PackedExpertWeights, packed_experts
from kernels.cpu.linear import interleave, pack, pack_int8, pad_channels


class CpuPackedExperts(nn.Module):
    """What `Experts` does, reading the weights of the chosen ones alone; an `ExpertsForm`.

    A token's result does not depend on the others, to the last bit.

    Args:
        source: with whose weights `kernels.cpu.linear.runs`, and whose size `can_gate`; copied.
        int8: as in `CpuPackedLinear`.
    """

    def __init__(self, source: Experts, *, int8: bool = False) -> None:
        super().__init__()
        self._size = source.down.shape[2]
        self._activation = source.activation
        bias: Tensor | None = None
        if source.gate_up_bias is not None:
            bias = torch.stack([_interleaved(each) for each in source.gate_up_bias])
        self._gate_up = _packed(map(_interleaved, source.gate_up), bias, int8=int8)
        self._down = _packed(source.down, source.down_bias, int8=int8)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, totals: Tensor) -> Tensor:
        return packed_experts(
            x,
            chosen,
            weights,
            totals,
            self._gate_up,
            self._down,
            size=self._size,
            activation=self._activation,
        )


def _interleaved(rows: Tensor) -> Tensor:
    """Return [2 N, ...] of alternating gates and ups in runs of half a panel of each."""
    return interleave(torch.cat((rows[::2], rows[1::2])))


def _packed(weights: Iterable[Tensor], bias: Tensor | None, *, int8: bool) -> PackedExpertWeights:
    """Return the panels of all experts' weights."""
    if not int8:
        return PackedExpertWeights(torch.stack([pack(weight) for weight in weights]), None, bias)
    quantized = [quantize_channels(weight) for weight in weights]
    packed = torch.stack([pack_int8(steps) for steps, _ in quantized])
    return PackedExpertWeights(
        packed, torch.stack([pad_channels(scale) for _, scale in quantized]), bias
    )
