"""Random weights, generated on the parameters' device: for benchmarks that only need a shape."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import nn

from engine.models.causal_lm import CausalLM


def fill_with_random_weights(
    model: CausalLM,
    seed: int,
    *,
    whole: CausalLM | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_layer: Callable[[nn.Module], None] | None = None,
) -> None:
    """Fill every parameter of `model` in place, deterministically by `seed`, its name and device.

    Of a rank, `whole` is the model that it is a part of: what is not cut is the same on all ranks.

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
    total, filled = sum(parameters.values()), 0
    for name, num_bytes in parameters.items():
        parameter = model.get_parameter(name)
        is_cut = whole is not None and whole.get_parameter(name).shape != parameter.shape
        _fill(parameter, name, _generator(parameter.device, seed, name, model.spec.rank * is_cut))
        del parameter  # before its layer is converted
        filled += num_bytes
        if on_layer is not None and name in last_of:
            on_layer(last_of[name])
        if on_progress is not None:
            on_progress(filled, total)


def _generator(device: torch.device, *subject: object) -> torch.Generator:
    digest = hashlib.blake2b(repr(subject).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def _fill(parameter: nn.Parameter, name: str, generator: torch.Generator) -> None:
    if parameter.dim() > 1:
        parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
    else:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
