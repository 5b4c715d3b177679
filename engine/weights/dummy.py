"""Random weights, generated on the parameters' device: for benchmarks that only need a shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn


def fill_with_random_weights(
    model: nn.Module, seed: int, *, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Fill every parameter of `model` in place, deterministically by `seed` and device.

    Matrices are normal with variance 1 / columns, which keeps activations in range through any
    number of layers and gives logits a variance of about 1; biases are 0, norm weights 1.
    `on_progress` is called with (bytes filled, total bytes), finally with both equal.
    """
    parameters = list(model.named_parameters())
    device = parameters[0][1].device
    generator = torch.Generator(device).manual_seed(seed)
    total = sum(parameter.nbytes for _, parameter in parameters)
    filled = 0
    for name, parameter in parameters:
        if parameter.dim() > 1:
            parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        filled += parameter.nbytes
        if on_progress is not None:
            on_progress(filled, total)
