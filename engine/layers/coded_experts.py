"""CodedExperts: experts on a GPU whose weights are codes, and whose activations are floats."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.experts import in_blocks
from kernels.experts.activation import ExpertActivation
from kernels.experts.combine import combine
from kernels.experts.products import expert_gated_linear, expert_linear
from kernels.quantized.codes import Codes


class CodedExperts(nn.Module):
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
        if gate_up_bias is not None:
            parts = gate_up_bias[:, ::2], gate_up_bias[:, 1::2]
            self._gate_up_bias = torch.cat(parts, 1)
        self._down_bias = down_bias
        self._activation = activation
        self._invariant = invariant

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, totals: Tensor) -> Tensor:
        blocks = in_blocks(x, chosen, totals, invariant=self._invariant)
        inner = expert_gated_linear(
            x, self._gate_up, self._gate_up_bias, blocks, self._activation, top_k=chosen.shape[1]
        )
        each = expert_linear(inner, self._down, self._down_bias, blocks)
        return combine(each, chosen, weights)
