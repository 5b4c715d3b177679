"""Mixture of experts (Shazeer et al., 2017): a router chooses a few MLPs for each token."""

from __future__ import annotations

from torch import Tensor, nn

from engine.layers.experts import Experts
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.scheme import Scheme
from kernels.cpu.activation import Activation


class Router(Linear):
    """A projection that decides rather than computes: it is never quantised."""


class MoE(nn.Module):
    """The sum of the `top_k` experts with the highest scores, weighted by them.

    Scores are a softmax over all experts, in float32.

    Args:
        size: features between the projections of an expert.
        normalizes: divide the weights of the chosen experts by their sum.
        shared_size: of an expert that every token goes through as well, weighted by a gate of its
            own (sigmoid); 0: there is none.
    """

    def __init__(
        self,
        hidden_size: int,
        size: int,
        *,
        num_experts: int,
        top_k: int,
        normalizes: bool,
        activation: Activation,
        shared_size: int,
        scheme: Scheme,
    ) -> None:
        super().__init__()
        dtype, device = scheme.dtype, scheme.device
        self._top_k = top_k
        self._normalizes = normalizes
        self.router: nn.Module = Router(
            hidden_size, {"router": num_experts}, bias=False, dtype=dtype, device=device
        )
        self.experts: nn.Module = Experts(
            hidden_size, size, num_experts, activation=activation, dtype=dtype, device=device
        )
        self.shared_expert: GatedMLP | None = None
        if shared_size:
            self.shared_expert = GatedMLP(
                hidden_size,
                shared_size,
                activation=activation,
                bias=False,
                scheme=scheme.at("shared_expert"),
            )
            self.shared_expert_gate: nn.Module = Router(
                hidden_size, {"shared_expert_gate": 1}, bias=False, dtype=dtype, device=device
            )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).float().softmax(-1)
        weights, expert_ids = scores.topk(self._top_k, dim=-1)
        if self._normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        out: Tensor = self.experts(x, expert_ids, weights)
        if self.shared_expert is not None:
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return out
