"""Scheme: makes the projections of a model, in the form in which its checkpoint stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import nn

from engine.layers.experts import Experts
from engine.layers.linear.linear import GatedLinear, Linear
from kernels.cpu.activation import Activation
from kernels.experts.activation import ExpertActivation


class Scheme(Protocol):
    """Makes the linears of a model.

    Attributes:
        dtype: of the activations, and of parameters that are not quantised.
        device: where the parameters are allocated.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def at(self, name: str) -> Self:
        """Return the scheme of the part `name` of the module that this is the scheme of."""

    def linear(self, in_features: int, parts: Mapping[str, int], *, bias: bool) -> nn.Module:
        """Return a module that computes y = x W^T + b; arguments as those of `Linear`."""

    def gated_linear(
        self,
        in_features: int,
        size: int,
        *,
        activation: Activation,
        bias: bool,
    ) -> nn.Module:
        """Return a module that computes activation(gate(x)) * up(x), with `size` features."""

    def experts(
        self,
        hidden_size: int,
        size: int,
        num_experts: int,
        *,
        activation: ExpertActivation,
        bias: bool,
    ) -> nn.Module:
        """Return an `ExpertsForm`, or what `engine.models.process_weights` replaces by one."""


@dataclass(frozen=True, slots=True)
class Unquantized:
    """The scheme of checkpoints in floating point.

    Attributes:
        read_to: where projections are allocated, if not on `device`: they are quantised from there.
    """

    dtype: torch.dtype
    device: torch.device
    read_to: torch.device | None = None

    def at(self, name: str) -> Self:
        return self

    def linear(self, in_features: int, parts: Mapping[str, int], *, bias: bool) -> Linear:
        return Linear(
            in_features, parts, bias=bias, dtype=self.dtype, device=self.read_to or self.device
        )

    def gated_linear(
        self,
        in_features: int,
        size: int,
        *,
        activation: Activation,
        bias: bool,
    ) -> GatedLinear:
        return GatedLinear(
            in_features,
            size,
            activation=activation,
            bias=bias,
            dtype=self.dtype,
            device=self.read_to or self.device,
        )

    def experts(
        self,
        hidden_size: int,
        size: int,
        num_experts: int,
        *,
        activation: ExpertActivation,
        bias: bool,
    ) -> Experts:
        return Experts(
            hidden_size,
            size,
            num_experts,
            activation=activation,
            bias=bias,
            dtype=self.dtype,
            device=self.device,
        )
