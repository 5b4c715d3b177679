"""Mixture of experts (Shazeer et al., 2017): a router chooses a few MLPs for each token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.scheme import Scheme
from kernels.experts.activation import ExpertActivation
from kernels.experts.routing import route


class Router(Linear):
    """A projection that decides rather than computes: it is never quantised."""


class MoE(nn.Module):
    """The sum of the `top_k` experts with the highest scores, weighted by them.

    Scores are a softmax over all experts, in float32.

    Attributes:
        expert_totals: int64 [num_experts], how often each was chosen, on the device.

    Args:
        size: features between the projections of an expert.
        normalizes: divide the weights of the chosen experts by their sum, which is a softmax over
            their scores alone.
        shared_size: of an expert that every token goes through as well, weighted by a gate of its
            own (sigmoid); 0: there is none.
        bias: whether the projections of the experts, and the router, have biases.
    """

    def __init__(
        self,
        hidden_size: int,
        size: int,
        *,
        num_experts: int,
        top_k: int,
        normalizes: bool,
        activation: ExpertActivation,
        shared_size: int,
        bias: bool = False,
        scheme: Scheme,
    ) -> None:
        super().__init__()
        dtype, device = scheme.dtype, scheme.device
        self._top_k = top_k
        self._normalizes = normalizes
        self.expert_totals = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.router: nn.Module = Router(
            hidden_size, {"router": num_experts}, bias=bias, dtype=dtype, device=device
        )
        self.experts = scheme.at("experts").experts(
            hidden_size, size, num_experts, activation=activation, bias=bias
        )
        self.shared_expert: GatedMLP | None = None
        if shared_size:
            self.shared_expert = GatedMLP(
                hidden_size,
                shared_size,
                activation=activation.kind,
                bias=False,
                scheme=scheme.at("shared_expert"),
            )
            self.shared_expert_gate: nn.Module = Router(
                hidden_size, {"shared_expert_gate": 1}, bias=False, dtype=dtype, device=device
            )

    def forward(self, x: Tensor, slot_mapping: Tensor | None = None) -> Tensor:
        """Return [T, hidden_size] of `x`, of the same shape.

        Tokens with -1 in `slot_mapping`, int64 [T], are padding: no expert is read for them, nor
        are they counted.
        """
        chosen, weights = route(
            self.router(x), self._top_k, normalize=self._normalizes, slots=slot_mapping
        )
        out: Tensor = self.experts(x, chosen, weights, self.expert_totals)
        if self.shared_expert is not None:
            # The sigmoid, as a softmax over (gate, 0): of rows torch computes each alone.
            gate = F.pad(self.shared_expert_gate(x), (0, 1)).softmax(-1)[:, :1]
            out = out + gate * self.shared_expert(x)
        return out
