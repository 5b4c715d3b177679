"""Projections and experts on a GPU whose weights are codes, and whose activations are floats."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.experts import in_blocks
from kernels.experts.activation import ExpertActivation
from kernels.experts.combine import combine
from kernels.experts.grouped_gemm import LARGE_BLOCK, expert_gated_linear, expert_linear
from kernels.quantized.codes import Codes
from kernels.quantized.dequantize import dequantize
from kernels.quantized.wna16_gemm import wna16_linear


class WNA16Linear(nn.Module):
    """y = x W^T + b. The weight takes the memory of its codes.

    Args:
        weight: It is not copied.
        bias: [out_features] or None, of the type of the activations, bfloat16 or float16.
        order: the input that each column of the weight multiplies; None: they are in order.
        invariant: a row of y depends on its row of x alone, to the last bit.
    """

    def __init__(
        self,
        weight: Codes,
        bias: Tensor | None,
        *,
        order: Tensor | None = None,
        invariant: bool = False,
    ) -> None:
        super().__init__()
        self._weight = weight
        self._bias = bias
        self._order = order
        self._invariant = invariant

    def forward(self, x: Tensor) -> Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        return wna16_linear(x, self._weight, self._bias, invariant=self._invariant)


class WNA16Experts(nn.Module):
    """What `Experts` does, with weights that take the memory of their codes; an `ExpertsForm`.

    Args:
        gate_up: [num_experts, 2 * size, hidden_size], gates first. It is not copied.
        down: [num_experts, hidden_size, size]; likewise.
        gate_up_bias, down_bias: [num_experts, ...], where gates and ups alternate; or None.
        invariant: a token's result does not depend on the others, to the last bit.
    """

    def __init__(
        self,
        gate_up: Codes,
        down: Codes,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        *,
        activation: ExpertActivation,
        invariant: bool = False,
    ) -> None:
        super().__init__()
        self._gate_up, self._down = gate_up, down
        self._gate_up_bias: Tensor | None = None
        self._alternating_bias = gate_up_bias
        if gate_up_bias is not None:
            parts = gate_up_bias[:, ::2], gate_up_bias[:, 1::2]
            self._gate_up_bias = torch.cat(parts, 1)
        self._down_bias = down_bias
        self._activation = activation
        self._invariant = invariant

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, totals: Tensor) -> Tensor:
        blocks = in_blocks(x, chosen, totals, invariant=self._invariant)
        gate_up: Codes | Tensor = self._gate_up
        down: Codes | Tensor = self._down
        gate_up_bias = self._gate_up_bias
        # Of many tokens products are bound by arithmetic, which widening the weights for each block
        # of rows adds to: of 8192 tokens on an H200, MXFP4's of gpt-oss-20b took 16 ms, floats' 3.
        is_written_out = not self._invariant and blocks.choices.shape[1] == LARGE_BLOCK
        if is_written_out:
            gate_up = dequantize(self._gate_up, x.dtype, halves=True)
            gate_up_bias = self._alternating_bias
        inner = expert_gated_linear(
            x, gate_up, gate_up_bias, blocks, self._activation, top_k=chosen.shape[1]
        )
        del gate_up  # a gigabyte, which the next one can take
        if is_written_out:
            down = dequantize(self._down, x.dtype)
        each = expert_linear(inner, down, self._down_bias, blocks)
        return combine(each, chosen, weights)
