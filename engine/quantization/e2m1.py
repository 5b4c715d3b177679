"""E2M1: 4-bit floats, two to a byte (OCP Microscaling, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the floats of uint8 [..., n] as float32 [..., 2 n], those in low bits first."""
    return e2m1_values(packed.device)[unpack_nibbles(packed).int()]


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the halves of uint8 [..., n], uint8 [..., 2 n], the low ones first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def e2m1_values(device: torch.device) -> Tensor:
    """Return the 16 values, float32."""
    return torch.tensor(_VALUES, device=device)
