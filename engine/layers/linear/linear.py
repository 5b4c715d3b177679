"""Linear: a projection, or several projections of the checkpoint stacked in one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kernels.cpu.activation import Activation
from kernels.gated_activation import gated_activation
from kernels.gemv import gated_linear, linear


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return an uninitialised parameter without gradient; the weight loader fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b, with the weights of one or more projections of the checkpoint stacked.

    `engine.models.process_weights` replaces it after loading by a faster one for its device.

    Attributes:
        parts: as given.

    Args:
        in_features: size of the last dimension of the input.
        parts: name of each projection in the checkpoint -> its output features, in the order of
            the output.
        bias: whether every part has a bias.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        out_features = sum(parts.values())
        self.weight = parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = parameter(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def destinations(self) -> dict[str, Tensor]:
        """Return where each tensor of the checkpoint goes, by its name beside this module."""
        views: dict[str, Tensor] = {}
        sizes = list(self.parts.values())
        for name, weight in zip(self.parts, torch.split(self.weight, sizes), strict=True):
            views[f"{name}.weight"] = weight
        if self.bias is not None:
            for name, bias in zip(self.parts, torch.split(self.bias, sizes), strict=True):
                views[f"{name}.bias"] = bias
        return views


class FloatLinear(Linear):
    """A projection that decides rather than computes: it is never quantised."""


class GatedLinear(Linear):
    """activation(gate(x)) * up(x), the two projections in one product.

    Attributes:
        activation: of the gates.
    """

    def __init__(
        self,
        in_features: int,
        size: int,
        *,
        activation: Activation,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        parts = {"gate_proj": size, "up_proj": size}
        super().__init__(in_features, parts, bias=bias, dtype=dtype, device=device)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return gated_linear(x, self.weight, self.bias, self.activation)


class Gated(nn.Module):
    """activation(gate) * up of what `projection` returns, a form of those of `GatedLinear`."""

    def __init__(self, projection: nn.Module, activation: Activation) -> None:
        super().__init__()
        self.projection = projection
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return gated_activation(self.projection(x), self.activation)
