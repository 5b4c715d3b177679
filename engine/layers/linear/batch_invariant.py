"""BatchInvariantLinear: a projection by our kernel for GPUs, with tiles that no batch changes."""

from __future__ import annotations

from torch import Tensor, nn

from kernels.matmul import matmul


class BatchInvariantLinear(nn.Module):
    """y = x W^T + b. A row of y depends on its row of x alone, to the last bit.

    Args:
        weight: [out_features, in_features], float. It is not copied.
        bias: [out_features] or None, of the same type.
        wide: return float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> None:
        super().__init__()
        self._weight = weight
        self._bias = bias
        self._wide = wide

    def forward(self, x: Tensor) -> Tensor:
        return matmul(x, self._weight, self._bias, wide=self._wide)
