"""Conversion of loaded projections: to the fastest form on their device, to int8, or to one form
for every batch.

A form is a module that replaces a `Linear`: it has the same `forward`, and is made of its weight
and bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from engine.config import Quantization
from engine.errors import UnsupportedError
from engine.layers.experts import Experts
from engine.layers.int8_linear import Int8Linear, multiplies_int8
from engine.layers.integer_weight import GroupedWeight
from engine.layers.linear import Gated, GatedLinear, Linear
from engine.layers.moe import Router
from engine.layers.packed_linear import PackedLinear, can_pack
from engine.layers.panel_experts import PanelExperts
from engine.layers.panel_linear import PanelLinear
from engine.layers.tiled_linear import TiledLinear
from engine.layers.vocabulary import LMHead
from engine.models.causal_lm import CausalLM
from engine.models.decoder import DecoderLayer
from engine.models.fused_layers import FusedLayers, can_fuse
from engine.quantization.experts import QuantizedExperts
from engine.quantization.linear import QuantizedLinear
from kernels.cpu import linear as panels
from kernels.device import has_triton


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
            "(x86: VNNI), or AVX2, a dtype other than float32 and the kernels that "
            "`python -m kernels.cpu` builds; leave it out"
        )


def check_deterministic(model: CausalLM, device: torch.device) -> None:
    """Raise `UnsupportedError` if `model` cannot be converted to be deterministic on `device`.

    The weights of `model` may be on any device.
    """
    if has_triton(device):
        return
    modules = [
        module.plain if isinstance(module, (QuantizedLinear, QuantizedExperts)) else module
        for module in model.modules()
    ]
    linears = [module for module in modules if isinstance(module, Linear)]
    mixtures = [module for module in modules if isinstance(module, Experts)]
    weights = [model.model.embed_tokens.rows, *(linear.weight for linear in linears)]
    if (
        not all(panels.runs(weight, device) for weight in weights)
        or not all(
            panels.can_gate(len(each.weight) // 2)
            for each in linears
            if isinstance(each, GatedLinear)
        )
        or not all(
            panels.runs(each.gate_up[0], device) and panels.can_gate(each.down.shape[2])
            for each in mixtures
        )
    ):
        raise UnsupportedError(
            "deterministic: on a CPU it needs the kernels that `python -m kernels.cpu` builds, and "
            "projections of a multiple of 4 inputs, of 16 in an MLP; leave it out"
        )


def convert_weights(
    model: CausalLM,
    quantization: Quantization | None,
    *,
    deterministic: bool = False,
    ours: bool = True,
) -> int:
    """Replace the loaded projections of `model` by their form for this device, if there is one.

    Those of quantised checkpoints stay integers if they are, and the products are ours and not in
    float32; the others get the weights that they stand for, in the model's dtype, first.

    The weight of each is freed before the next is converted. With `quantization` all are
    quantised, including the head: it adds little to the error of the layers, and is a large part
    of what a step of few sequences reads. A tied head is a converted copy: the embedding needs
    plain rows. If all layers can be fused, `model` runs them in one operation afterwards.

    Without `ours`, oneDNN's products serve in place of ours where it has some.

    With `deterministic`, which `check_deterministic` must allow, a token's logits depend on its own
    sequence alone, to the last bit: our own products serve, and on a CPU the layers are fused.

    Returns:
        The bytes of weights that have been dequantised.

    Raises:
        UnsupportedError: this machine cannot quantise a projection of this shape.
        CheckpointError: a tensor of a quantised projection is broken.
    """
    forms = _Forms(
        int8=quantization is not None, deterministic=deterministic, ours=ours or deterministic
    )
    num_bytes = _convert(model.model, forms)
    # Logits are float32: without rounding to bfloat16 in between, fewer of them are equal.
    head_form = partial(forms.of_weight, bias=None, wide=True)
    if isinstance(model.lm_head, LMHead):
        model.lm_head = head_form(model.lm_head.rows) or model.lm_head
    else:
        model.model.embed_tokens.head = head_form(model.model.embed_tokens.rows)
    layers = [cast(DecoderLayer, layer) for layer in model.model.layers]
    if can_fuse(layers):
        model.model.fused = FusedLayers(layers, split_keys=not deterministic)
    return num_bytes


def num_copied_bytes(
    model: CausalLM,
    quantization: Quantization | None,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> int:
    """Return the bytes that `convert_weights` adds to `model` on `device`, at most."""
    weight = model.model.embed_tokens.rows
    is_copied = device.type == "cpu" and (
        quantization is not None
        or deterministic
        or panels.serves(weight, device)
        or can_pack(weight.dtype)
    )
    dequantized = sum(
        module.num_bytes_dequantized - sum(stored.nbytes for stored in module.parameters())
        for module in model.modules()
        if isinstance(module, (QuantizedLinear, QuantizedExperts))
    )
    return dequantized + (weight.nbytes if is_copied and model.lm_head is None else 0)


@dataclass(frozen=True, slots=True)
class _Forms:
    """Chooses the form of each projection; None for one that stays."""

    int8: bool
    deterministic: bool
    ours: bool

    def of_layer(self, linear: Linear | Experts) -> nn.Module | None:
        if isinstance(linear, Experts):
            return self._of_experts(linear)
        if isinstance(linear, Router):
            return replace(self, int8=False).of_weight(linear.weight, linear.bias)
        weight, bias = linear.weight, linear.bias
        if not isinstance(linear, GatedLinear):
            return self.of_weight(weight, bias)
        if self.ours and self._are_panels(weight) and panels.can_gate(len(weight) // 2):
            return PanelLinear(weight, bias, int8=self.int8, activation=linear.activation)
        form = self.of_weight(weight, bias)
        return None if form is None else Gated(form, linear.activation)

    def of_integers(self, linear: QuantizedLinear) -> nn.Module | None:
        """Return a product of the integers that the checkpoint has, if it has such."""
        plain, activation = linear.plain, None
        if isinstance(plain, GatedLinear):
            activation = plain.activation
            if not panels.can_gate(len(plain.weight) // 2):
                return None
        is_rounded = plain.weight.dtype != torch.float32  # in which activations are exact
        weight = None
        if is_rounded and self._are_panels(plain.weight, linear.device):
            weight = linear.integers()
        if isinstance(weight, GroupedWeight) and (self.int8 or weight.group_size % panels.GROUP):
            return None
        return None if weight is None else PanelLinear(weight, linear.bias, activation=activation)

    def of_weight(
        self, weight: Tensor, bias: Tensor | None, *, wide: bool = False
    ) -> nn.Module | None:
        if self.ours and self._are_panels(weight):
            return PanelLinear(weight, bias, int8=self.int8, wide=wide)
        if self.deterministic:
            return TiledLinear(weight, bias, wide=wide)
        if self.int8:
            if not multiplies_int8():
                raise UnsupportedError(
                    "quantization: int8 needs projections of a multiple of 4 inputs on this CPU "
                    f"(got {weight.shape[1]}); leave it out"
                )
            return Int8Linear(weight, bias)
        is_packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        return PackedLinear(weight, bias) if is_packed else None

    def _of_experts(self, experts: Experts) -> nn.Module | None:
        # Also where oneDNN's products are faster: it has none of several experts at once.
        weight = experts.gate_up[0]
        is_packed = not has_triton(weight.device) and panels.runs(weight, weight.device)
        if is_packed and panels.can_gate(experts.down.shape[2]):
            return PanelExperts(experts, int8=self.int8)
        if self.int8:
            raise UnsupportedError(
                "quantization: int8 is not for a mixture of experts on this CPU; leave it out"
            )
        experts.invariant = self.deterministic
        return None

    def _are_panels(self, weight: Tensor, device: torch.device | None = None) -> bool:
        device = device or weight.device
        if has_triton(device):
            return False
        return self.deterministic or panels.serves(weight, device)


def _convert(module: nn.Module, forms: _Forms) -> int:
    """Convert the projections below `module`; return the bytes of those that were dequantised."""
    num_bytes = 0
    for name in [name for name, _ in module.named_children()]:
        child = module.get_submodule(name)
        if isinstance(child, QuantizedLinear) and (form := forms.of_integers(child)) is not None:
            setattr(module, name, form)
            continue
        if isinstance(child, (QuantizedLinear, QuantizedExperts)):
            num_bytes += child.num_bytes_dequantized
            child = child.dequantized()
            setattr(module, name, child)
        if not isinstance(child, (Linear, Experts)):
            num_bytes += _convert(child, forms)
        elif (form := forms.of_layer(child)) is not None:
            setattr(module, name, form)
    return num_bytes
