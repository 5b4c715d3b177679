"""The gated activation of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.activation import ACTIVATIONS, Activation
from kernels.gated_activation import reference


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """(up + offset) * kind(gate) (Shazeer, 2020), of clamped gates and ups.

    The defaults are SwiGLU; gpt-oss has alpha 1.702, limit 7 and offset 1.

    Attributes:
        kind: of the gates.
        alpha: SiLU is gate * sigmoid(alpha * gate); positive, and 1 for other kinds.
        limit: gates are at most this, ups at most this in magnitude; positive, infinity for none.
        offset: added to the ups.
    """

    kind: Activation = "silu"
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ACTIVATIONS:
            raise ValueError(f"kind: must be one of {', '.join(ACTIVATIONS)} (got {self.kind})")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha: must be positive and finite (got {self.alpha})")
        if self.kind != "silu" and self.alpha != 1.0:
            raise ValueError(f"alpha: must be 1 with {self.kind} (got {self.alpha})")
        if not self.limit > 0:
            raise ValueError(f"limit: must be positive (got {self.limit})")
        if not math.isfinite(self.offset):
            raise ValueError(f"offset: must be finite (got {self.offset})")

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation, computed in float32."""
        gate = gate.float().clamp(max=self.limit)
        up = up.float().clamp(-self.limit, self.limit) + self.offset
        if self.kind == "silu":
            return gate * torch.sigmoid(self.alpha * gate) * up
        return reference(torch.cat((gate, up), -1), self.kind)
