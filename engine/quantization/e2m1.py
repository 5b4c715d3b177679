"""E2M1: 4-bit floats, two to a byte (OCP Microscaling, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantized.codes import E2M1


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the floats of uint8 [..., n] as float32 [..., 2 n], those in low bits first."""
    return torch.tensor(E2M1, device=packed.device)[unpack_nibbles(packed).int()]


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the halves of uint8 [..., n], uint8 [..., 2 n], the low ones first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
