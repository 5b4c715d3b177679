"""WNA16Linear: a projection on a GPU whose weights are codes, and whose activations are floats."""

from __future__ import annotations

from torch import Tensor, nn

from kernels.quantized.codes import Codes
from kernels.quantized.wna16_gemm import wna16_linear


class WNA16Linear(nn.Module):
    """y = x W^T + b. The weight takes the memory of its codes.

    Args:
        weight: It is not copied.
        bias: [out_features] or None, of the type of the activations, bfloat16 or float16.
        order: the input that each column of the weight multiplies; None: they are in order.
        invariant: a row of y depends on its row of x alone, to the last bit.
    """

    def __init__(
        self,
        weight: Codes,
        bias: Tensor | None,
        *,
        order: Tensor | None = None,
        invariant: bool = False,
    ) -> None:
        super().__init__()
        self._weight = weight
        self._bias = bias
        self._order = order
        self._invariant = invariant

    def forward(self, x: Tensor) -> Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        return wna16_linear(x, self._weight, self._bias, invariant=self._invariant)
