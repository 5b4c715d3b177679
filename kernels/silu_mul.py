"""The gated activation of a SwiGLU MLP (Shazeer, 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.checks import FLOATS, check_dtype


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, computed in float32.

    Args:
        gate_up: float [..., 2 I], the gate in the first half of the last dimension.

    Returns:
        [..., I] in the dtype of `gate_up`.

    Raises:
        ValueError: the last dimension is odd, or the dtype no float.
    """
    check_dtype("gate_up", gate_up, *FLOATS)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: the last dimension must be even (got {gate_up.shape[-1]})")
    return _reference(gate_up)


def _reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
