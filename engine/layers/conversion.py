"""What loaded projections are turned into: the form in which they serve fastest on their device.

A form is a module with the `forward` of `Linear` that is made of a loaded weight and bias. What a
checkpoint stores in a form already is a module with the `destinations` of `Linear` too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.config import Quantization
from engine.errors import UnsupportedError
from engine.layers.int8_linear import Int8Linear, multiplies_int8
from engine.layers.linear import Linear
from engine.layers.packed_linear import PackedLinear, can_pack
from engine.models.causal_lm import CausalLM

Form = Callable[[Tensor, Tensor | None], nn.Module]


def check_quantization(quantization: Quantization | None, device: torch.device) -> None:
    """Raise `UnsupportedError` if there are no kernels for `quantization` on `device`."""
    if quantization is None:
        return
    if device.type != "cpu":
        raise UnsupportedError(
            f"quantization: {quantization} is for CPUs only; leave it out, or set device to cpu"
        )
    if not multiplies_int8():
        raise UnsupportedError(
            f"quantization: {quantization} needs a CPU that multiplies 8-bit integers exactly "
            "(x86: VNNI); leave it out"
        )


def convert_weights(model: CausalLM, quantization: Quantization | None) -> None:
    """Replace the loaded projections of `model` by the form that serves them, where there is one.

    The weight of each is freed before the next is converted. With `quantization` that of the layers
    is quantised; the head stays as precise as it is, for its errors would go straight into the
    logits. A head that is the embedding is copied, for the embedding needs plain rows.
    """
    weight = model.model.embed_tokens.weight
    packed = PackedLinear if _packs(weight.device, weight.dtype) else None
    form = packed if quantization is None else Int8Linear
    if form is not None:
        _convert(model.model, form)
    if packed is not None:
        if model.lm_head is None:
            model.model.embed_tokens.head = packed(weight, None)
        else:
            _convert(model, packed)


def num_copied_bytes(model: CausalLM, device: torch.device) -> int:
    """Return the bytes by which `convert_weights` makes the weights of `model` on `device` grow."""
    weight = model.model.embed_tokens.weight
    return weight.nbytes if model.lm_head is None and _packs(device, weight.dtype) else 0


def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and can_pack(dtype)


def _convert(module: nn.Module, form: Form) -> None:
    for name in [name for name, _ in module.named_children()]:
        child = module.get_submodule(name)
        if isinstance(child, Linear):
            setattr(module, name, form(child.weight, child.bias))
        else:
            _convert(child, form)
