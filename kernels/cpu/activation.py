"""Activation functions of MLPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import operations

Activation = Literal["silu", "gelu", "gelu_tanh"]

# As numbered in csrc/activation.h.
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_TORCHS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def plain_activation(x: Tensor, activation: Activation) -> Tensor:
    """Return the activation of each value of `x`, computed in float32, in the dtype of `x`.

    With our CPU kernels a result depends on its value alone. torch's own, which serve elsewhere,
    have other bits on a CPU at the end of a row or of a thread's share: values that do not fill a
    vector are computed in another way there.
    """
    if (fast := operations(x)) is not None:
        result: Tensor = fast.plain_activation(x, ACTIVATIONS[activation])
        return result
    return _TORCHS[activation](x)
