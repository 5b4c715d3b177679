"""RMS normalisation (Zhang and Sennrich, 2019), alone and fused with the residual addition."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import FLOATS, check_dtype, check_like, check_shape


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    Args:
        x: float [..., H].
        weight: [H], of the dtype of `x`.
        eps: added to the mean square.

    Returns:
        [..., H] in the dtype of `x`; normalised in float32, rounded, then weighted.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device.
    """
    _check(x, weight)
    return _reference(x, weight, eps)


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `rms_norm(x + residual)` and `x + residual`; changes neither argument.

    Args:
        x, residual: float [..., H], alike.
        weight: [H], of the dtype of `x`.
        eps: added to the mean square.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device.
    """
    _check(x, weight)
    check_shape("residual", residual, tuple(x.shape))
    check_like("residual", residual, x)
    total = residual + x
    return _reference(total, weight, eps), total


def _reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def _check(x: Tensor, weight: Tensor) -> None:
    check_dtype("x", x, *FLOATS)
    check_shape("weight", weight, (x.shape[-1],))
    check_like("weight", weight, x)
