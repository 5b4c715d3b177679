"""Mixture of experts (Shazeer et al., 2017): a router chooses a few MLPs for each token."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.linear.linear import FloatLinear, parameter
from engine.layers.mlp import GatedMLP
from engine.layers.scheme import Scheme
from kernels.experts.activation import ExpertActivation
from kernels.experts.routing import Scores, route


class MoE(nn.Module):
    """The sum of the `top_k` experts with the highest scores, weighted by them.

    Attributes:
        expert_totals: int64 [num_experts], how often each was chosen, on the device.
        choice_bias: float32 [num_experts], or None.

    Args:
        size: features between the projections of an expert.
        scores, weight_scale: as in `kernels.experts.routing`.
        chooses_by_bias: the highest sums of score and bias choose instead, and the router computes
            in float32, as these models do: small differences decide.
        normalizes: divide the weights of the chosen experts by their sum.
        own: which experts this rank has, whose sum is a part of the sum over the ranks; None: all.
        shared_size: of an expert that every token goes through as well; 0: there is none.
        shared_is_gated: it is weighted by a gate of its own (sigmoid).
        bias: whether the projections of the experts, and the router, have biases.
    """

    def __init__(
        self,
        hidden_size: int,
        size: int,
        *,
        num_experts: int,
        own: range | None = None,
        top_k: int,
        normalizes: bool,
        activation: ExpertActivation,
        shared_size: int,
        scores: Scores = "softmax",
        chooses_by_bias: bool = False,
        weight_scale: float = 1.0,
        shared_is_gated: bool = True,
        bias: bool = False,
        scheme: Scheme,
    ) -> None:
        super().__init__()
        dtype, device = scheme.dtype, scheme.device
        num_own = num_experts if own is None else len(own)
        self._route = partial(
            route, top_k=top_k, normalize=normalizes, scores=scores, scale=weight_scale
        )
        # Those before the first are of padding.
        self._totals = torch.zeros(1 + num_experts, dtype=torch.int64, device=device)
        self.expert_totals = self._totals[1:]
        self._own = own
        self._own_totals = torch.zeros(num_own, dtype=torch.int64, device=device)
        self.choice_bias: nn.Parameter | None = None
        router_dtype = dtype
        if chooses_by_bias:
            router_dtype = torch.float32
            self.choice_bias = parameter(num_experts, dtype=torch.float32, device=device)
        self._router_dtype = router_dtype
        self.router: nn.Module = FloatLinear(
            hidden_size, {"router": num_experts}, bias=bias, dtype=router_dtype, device=device
        )
        self.experts = scheme.at("experts").experts(
            hidden_size, size, num_own, activation=activation, bias=bias
        )
        self.shared_expert: GatedMLP | None = None
        self.shared_expert_gate: nn.Module | None = None
        if shared_size:
            self.shared_expert = GatedMLP(
                hidden_size,
                shared_size,
                activation=activation.kind,
                bias=False,
                scheme=scheme.at("shared_expert"),
            )
        if shared_size and shared_is_gated:
            self.shared_expert_gate = FloatLinear(
                hidden_size, {"shared_expert_gate": 1}, bias=False, dtype=dtype, device=device
            )

    def forward(self, x: Tensor, slot_mapping: Tensor | None = None) -> Tensor:
        """Return [T, hidden_size] of `x`, of the same shape.

        Tokens with -1 in `slot_mapping`, int64 [T], are padding: no expert is read for them, nor
        are they counted.
        """
        logits = self.router(x.to(self._router_dtype))
        chosen, weights = self._route(logits, bias=self.choice_bias, slots=slot_mapping)
        totals = self.expert_totals
        if self._own is not None:
            chosen, totals = self._among_own(chosen, self._own), self._own_totals
        out: Tensor = self.experts(x, chosen, weights, totals)
        if self.shared_expert is None:
            return out
        shared: Tensor = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            # The sigmoid, as a softmax over (gate, 0): of rows torch computes each alone.
            gate = F.pad(self.shared_expert_gate(x), (0, 1)).softmax(-1)[:, :1]
            shared = gate * shared
        return out + shared

    def _among_own(self, chosen: Tensor, own: range) -> Tensor:
        """Count all choices; return them as indices of the rank's own experts, -1 of others."""
        indices = chosen.flatten().long() + 1
        self._totals.scatter_add_(0, indices, torch.ones_like(indices))
        is_own = (chosen >= own.start) & (chosen < own.stop)
        return (chosen - own.start).where(is_own, -1)
