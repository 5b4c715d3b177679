"""Weights of integers, as products on a CPU take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Int8Weight(NamedTuple):
    """A weight [N, K]: int8 steps [N, K], and the float32 scales [N] of the rows."""

    steps: Tensor
    scale: Tensor


class GroupedWeight(NamedTuple):
    """A weight [N, K] of `bits` bits, `steps * scale + offset` with both of a group of inputs.

    `steps` is uint8 [N, K]; `scale` and `offset` are float32 [N, groups].
    """

    steps: Tensor
    scale: Tensor
    offset: Tensor
    bits: int

    @property
    def group_size(self) -> int:
        """Inputs of a group, which are consecutive."""
        return self.steps.shape[1] // self.scale.shape[1]


IntegerWeight = Int8Weight | GroupedWeight


def stack(parts: Sequence[IntegerWeight]) -> IntegerWeight | None:
    """Return the weight of all rows of `parts`; None: they are of different kinds."""
    channels = [part for part in parts if isinstance(part, Int8Weight)]
    groups = [part for part in parts if isinstance(part, GroupedWeight)]
    if not groups:
        return Int8Weight(*(torch.cat(each) for each in zip(*channels, strict=True)))
    if channels or len({(part.bits, part.scale.shape[1]) for part in groups}) > 1:
        return None
    return GroupedWeight(
        torch.cat([part.steps for part in groups]),
        torch.cat([part.scale for part in groups]),
        torch.cat([part.offset for part in groups]),
        groups[0].bits,
    )
