"""E2M1: 4-bit floats, two to a byte (OCP Microscaling, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the floats of uint8 [..., n] as float32 [..., 2 n], those in low bits first."""
    steps = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return torch.tensor(_VALUES, device=packed.device)[steps.int()]
