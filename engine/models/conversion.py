"""Conversion of loaded projections to the form that is fastest on their device, or to int8.

A form is a module that replaces a `Linear`: it has the same `forward`, and is made of its weight
and bias.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from engine.config import Quantization
from engine.errors import UnsupportedError
from engine.layers.int8_linear import Int8Linear, multiplies_int8
from engine.layers.linear import Linear
from engine.layers.mlp import Gated, GatedLinear
from engine.layers.packed_linear import PackedLinear, can_pack
from engine.layers.panel_linear import PanelLinear
from engine.layers.vocabulary import LMHead
from engine.models.causal_lm import CausalLM, DecoderLayer
from engine.models.fused_layers import FusedLayers, can_fuse
from kernels.cpu import linear as panels


def check_quantization(
    quantization: Quantization | None, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise `UnsupportedError` if weights of `dtype` cannot be quantised so on `device`."""
    if quantization is None:
        return
    if device.type != "cpu":
        raise UnsupportedError(
            f"quantization: {quantization} is for CPUs only; leave it out, or set device to cpu"
        )
    if not (multiplies_int8() or panels.serves(torch.empty(0, 0, dtype=dtype), device)):
        raise UnsupportedError(
            f"quantization: {quantization} needs a CPU that multiplies 8-bit integers exactly "
            "(x86: VNNI), or AVX2, dtype bfloat16 and the kernels that `python -m kernels.cpu` "
            "builds; leave it out"
        )


def convert_weights(model: CausalLM, quantization: Quantization | None) -> None:
    """Replace the loaded projections of `model` by their form for this device, if there is one.

    The weight of each is freed before the next is converted. With `quantization` all are
    quantised, including the head: it adds little to the error of the layers, and is a large part
    of what a step of few sequences reads. A tied head is a converted copy: the embedding needs
    plain rows. If all layers can be fused, `model` runs them in one operation afterwards.

    Raises:
        UnsupportedError: this machine cannot quantise a projection of this shape.
    """
    int8 = quantization is not None
    _convert(model.model, partial(_layer_form, int8=int8))
    # Logits are float32: without rounding to bfloat16 in between, fewer of them are equal.
    head_form = partial(_form, bias=None, int8=int8, wide=True)
    if isinstance(model.lm_head, LMHead):
        model.lm_head = head_form(model.lm_head.rows) or model.lm_head
    else:
        model.model.embed_tokens.head = head_form(model.model.embed_tokens.rows)
    layers = [cast(DecoderLayer, layer) for layer in model.model.layers]
    if can_fuse(layers):
        model.model.fused = FusedLayers(layers)


def num_copied_bytes(
    model: CausalLM, quantization: Quantization | None, device: torch.device
) -> int:
    """Return the bytes that `convert_weights` adds to `model` on `device`, at most."""
    weight = model.model.embed_tokens.rows
    is_copied = device.type == "cpu" and (
        quantization is not None or panels.serves(weight, device) or can_pack(weight.dtype)
    )
    return weight.nbytes if is_copied and model.lm_head is None else 0


def _layer_form(linear: Linear, *, int8: bool) -> nn.Module | None:
    weight, bias = linear.weight, linear.bias
    if not isinstance(linear, GatedLinear):
        return _form(weight, bias, int8=int8)
    if panels.serves(weight, weight.device) and panels.can_gate(len(weight) // 2):
        return PanelLinear(weight, bias, int8=int8, activation="silu")
    form = _form(weight, bias, int8=int8)
    return None if form is None else Gated(form)


def _form(
    weight: Tensor, bias: Tensor | None, *, int8: bool, wide: bool = False
) -> nn.Module | None:
    if panels.serves(weight, weight.device):
        return PanelLinear(weight, bias, int8=int8, wide=wide)
    if int8:
        if not multiplies_int8():
            raise UnsupportedError(
                "quantization: int8 needs projections of a multiple of 4 inputs on this CPU (got "
                f"{weight.shape[1]}); leave it out"
            )
        return Int8Linear(weight, bias)
    is_packed = weight.device.type == "cpu" and can_pack(weight.dtype)
    return PackedLinear(weight, bias) if is_packed else None


def _convert(module: nn.Module, form_of: Callable[[Linear], nn.Module | None]) -> None:
    for name in [name for name, _ in module.named_children()]:
        child = module.get_submodule(name)
        if not isinstance(child, Linear):
            _convert(child, form_of)
        elif (form := form_of(child)) is not None:
            setattr(module, name, form)
