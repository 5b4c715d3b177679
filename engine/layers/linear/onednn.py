"""OneDnnLinear: a projection on a CPU, its weight in the layout that oneDNN reads fastest."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has products of its own for weights of `dtype` on this machine."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


class OneDnnLinear(nn.Module):
    """y = x W^T + b in floating point.

    Args:
        weight: [out_features, in_features], of a type that `can_pack` allows. It is copied.
        bias: [out_features] or None, of the same type.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return out
