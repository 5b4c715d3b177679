"""RankGroup: what the ranks of a model exchange within a step, and agree on before the first one.

Which exchanges a step makes, in which order and of which shapes, follows from the step's arrays
alone: each rank makes the same ones, or all wait for each other in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class RankGroup(Protocol):
    """The ranks of one model, seen from one of them.

    Attributes:
        rank: of this one.
        size: how many there are.
        shared_sum: what makes the sums of layers that are one operation; None: there is nothing.
        sum_norm: as `rms_norm_add` with the sum of all ranks' `x` in place of `x`, in one operation
            with the same result; None: there is nothing.
    """

    rank: int
    size: int
    shared_sum: Any
    sum_norm: Any

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, float [T, N], in its dtype.

        It is added in the order of the ranks in float32 and rounded once: every rank gets the same
        bits, so that all routers choose the same experts. `x` may be overwritten.
        """

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return float32 [R, sum(widths)] at rank 0: all ranks' `x` beside each other.

        Args:
            x: float32 [R, `widths[rank]`], which other ranks get back.
        """

    def least(self, value: int) -> int:
        """Return the least of all ranks' values."""

    def first(self, value: int) -> int:
        """Return the value of rank 0; the other ranks' are not read."""

    def share(self, token_ids: Tensor) -> Tensor:
        """Return the `token_ids`, int64 [R], of rank 0; the other ranks' are not read."""
