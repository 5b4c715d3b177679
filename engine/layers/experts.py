"""The experts of a mixture: gated MLPs of which each token goes through a few."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from engine.layers.linear.linear import parameter
from kernels.device import has_triton, next_power_of_2
from kernels.experts.activation import ExpertActivation
from kernels.experts.combine import combine
from kernels.experts.grouped_gemm import block_rows, expert_gated_linear, expert_linear
from kernels.experts.sorting import ExpertBlocks, sort_by_expert


class ExpertsForm(Protocol):
    """What multiplies with the chosen experts."""

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, totals: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [T, hidden_size].

        The number of each expert's choices is added to `totals`.

        Args:
            x: [T, hidden_size].
            chosen: int32 [T, top_k], each token's experts; of padding -1.
            weights: float32 [T, top_k].
            totals: int64 [num_experts].
        """


class Experts(nn.Module):
    """`num_experts` gated MLPs with `size` features between; an `ExpertsForm`.

    `engine.models.process_weights` replaces it after loading by a faster one for its device.

    Attributes:
        gate_up: [num_experts, 2 * size, hidden_size]; even rows are gates, odd ones ups.
        down: [num_experts, hidden_size, size].
        gate_up_bias, down_bias: [num_experts, ...] likewise, or None.
        activation: of gates and ups.
        invariant: a token's result does not depend on the others, to the last bit; on a GPU.
    """

    def __init__(
        self,
        hidden_size: int,
        size: int,
        num_experts: int,
        *,
        activation: ExpertActivation,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.gate_up = parameter(num_experts, 2 * size, hidden_size, dtype=dtype, device=device)
        self.down = parameter(num_experts, hidden_size, size, dtype=dtype, device=device)
        self.gate_up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if bias:
            self.gate_up_bias = parameter(num_experts, 2 * size, dtype=dtype, device=device)
            self.down_bias = parameter(num_experts, hidden_size, dtype=dtype, device=device)
        self.activation = activation
        self.invariant = False

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, totals: Tensor) -> Tensor:
        blocks = in_blocks(x, chosen, totals, invariant=self.invariant)
        inner = expert_gated_linear(
            x, self.gate_up, self.gate_up_bias, blocks, self.activation, top_k=chosen.shape[1]
        )
        each = expert_linear(inner, self.down, self.down_bias, blocks)
        return combine(each, chosen, weights)

    def destinations(self) -> dict[str, Tensor]:
        """Return where each tensor of the checkpoint goes, by its name beside this module."""
        tensors: dict[str, Tensor] = {}
        parts = {
            "gate_proj.weight": self.gate_up[:, ::2],
            "up_proj.weight": self.gate_up[:, 1::2],
            "down_proj.weight": self.down,
        }
        if self.gate_up_bias is not None and self.down_bias is not None:
            parts |= {
                "gate_proj.bias": self.gate_up_bias[:, ::2],
                "up_proj.bias": self.gate_up_bias[:, 1::2],
                "down_proj.bias": self.down_bias,
            }
        for name, part in parts.items():
            tensors |= {f"experts.{i}.{name}": each for i, each in enumerate(part)}
        return tensors

    def stacked_destinations(self) -> dict[str, Tensor]:
        """Return the same for checkpoints that stack the experts, inputs first."""
        tensors = {
            "experts.gate_up_proj": self.gate_up.transpose(1, 2),
            "experts.down_proj": self.down.transpose(1, 2),
        }
        if self.gate_up_bias is not None and self.down_bias is not None:
            tensors["experts.gate_up_proj_bias"] = self.gate_up_bias
            tensors["experts.down_proj_bias"] = self.down_bias
        return tensors


def in_blocks(x: Tensor, chosen: Tensor, totals: Tensor, *, invariant: bool) -> ExpertBlocks:
    """Return the choices in blocks as large as products of `x` take; arguments as above."""
    if has_triton(x.device):
        rows = block_rows(x.dtype, chosen.numel(), len(totals), invariant=invariant)
    else:
        rows = next_power_of_2(chosen.numel())  # one product per expert
    return sort_by_expert(chosen, totals, rows)
