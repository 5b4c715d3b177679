"""Random weights, generated on the parameters' device: for benchmarks that only need a shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from engine.models.causal_lm import CausalLM


def fill_with_random_weights(
    model: CausalLM,
    seed: int,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    on_layer: Callable[[nn.Module], None] | None = None,
) -> None:
    """Fill every parameter of `model` in place, deterministically by `seed` and device.

    Matrices are normal with variance 1 / columns, which keeps activations in range through any
    number of layers and gives logits a variance of about 1; biases are 0, norm weights 1.
    `on_progress` is called with (bytes filled, total bytes), finally with both equal; `on_layer`
    with each decoder layer once it is filled, and may replace what is in it.
    """
    parameters = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    last_of = {
        [name for name in parameters if name.startswith(f"model.layers.{i}.")][-1]: layer
        for i, layer in enumerate(model.model.layers)
    }
    generators = {
        device: torch.Generator(device).manual_seed(seed)
        for device in {parameter.device for parameter in model.parameters()}
    }
    total, filled = sum(parameters.values()), 0
    for name, num_bytes in parameters.items():
        parameter = model.get_parameter(name)
        _fill(parameter, name, generators[parameter.device])
        del parameter  # before its layer is converted
        filled += num_bytes
        if on_layer is not None and name in last_of:
            on_layer(last_of[name])
        if on_progress is not None:
            on_progress(filled, total)


def _fill(parameter: nn.Parameter, name: str, generator: torch.Generator) -> None:
    if parameter.dim() > 1:
        parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
    else:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
