"""Conversion of loaded projections: to the fastest form on their device, to integers of fewer bits,
or to one form for every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from engine.config.setting_types import Quantization
from engine.errors import UnsupportedError
from engine.layers.experts import Experts
from engine.layers.int8_linear import multiplies_int8
from engine.layers.integer_weight import IntegerWeight
from engine.layers.linear import GatedLinear, Linear
from engine.layers.mlp import GatedMLP
from engine.layers.panel_linear import PanelLinear
from engine.layers.vocabulary import LMHead
from engine.models.causal_lm import CausalLM
from engine.models.decoder import DecoderLayer
from engine.models.forms import Forms
from engine.models.fused_layers import FusedLayers, can_fuse
from engine.models.gpu_forms import fuse_norms, fuse_quantisation
from engine.quantization.experts import QuantizedExperts
from engine.quantization.linear import QuantizedLinear
from kernels.cpu import linear as panels
from kernels.cpu.large_pages import LargePages
from kernels.device import has_triton


def check_quantization(
    quantization: Quantization | None, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise `UnsupportedError` if weights of `dtype` cannot be quantised so on `device`."""
    if quantization is None:
        return
    if quantization == "fp8":
        if not has_triton(device):
            raise UnsupportedError(
                "quantization: fp8 is for GPUs only: a CPU has no products of it; set it to int8, "
                "or leave it out"
            )
        if dtype == torch.float32:
            raise UnsupportedError(
                "quantization: fp8 needs a dtype of 16 bits, as its products have; set dtype to "
                "bfloat16, or leave it out"
            )
        return
    if device.type != "cpu":
        raise UnsupportedError(
            f"quantization: {quantization} is for CPUs only; leave it out, or set device to cpu"
        )
    if panels.serves(torch.empty(0, 0, dtype=dtype), device):
        return
    if quantization == "int4":
        raise UnsupportedError(
            "quantization: int4 needs a dtype other than float32, a CPU with AVX2, and the kernels "
            "that `python -m kernels.cpu` builds; leave it out"
        )
    if not multiplies_int8():
        raise UnsupportedError(
            "quantization: int8 needs a CPU that multiplies 8-bit integers exactly (x86: VNNI), or "
            "AVX2, a dtype other than float32 and the kernels that `python -m kernels.cpu` builds; "
            "leave it out"
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


class Conversion:
    """Replaces the loaded projections of a model by their form for its device, if there is one.

    Those of quantised checkpoints stay what they are if there are products of it, which are ours
    and not in float32; the others get the weights that they stand for, in the model's dtype, first.

    With `quantization` all are quantised, on a CPU including the head: in 8 bits it adds little to
    the error of the layers, and is a large part of what a step of few sequences reads.

    Without `ours`, oneDNN's products serve in place of ours where it has some.

    With `deterministic`, which `check_deterministic` must allow, a token's logits depend on its own
    sequence alone, to the last bit: our own products serve, and on a CPU the layers are fused.

    Attributes:
        num_bytes_dequantized: of weights that have been dequantised so far.
    """

    def __init__(
        self,
        model: CausalLM,
        quantization: Quantization | None,
        *,
        deterministic: bool = False,
        ours: bool = True,
    ) -> None:
        device = model.model.embed_tokens.weight.device
        self._model = model
        self._forms = Forms(device, quantization, deterministic, ours)
        self._pages = LargePages()
        self.num_bytes_dequantized = 0

    def convert(self, module: nn.Module) -> None:
        """Convert the projections below `module`, a layer of the model, which must be loaded.

        The weight of each is freed before the next is converted.

        Raises:
            UnsupportedError: this machine cannot quantise a projection of this shape.
            CheckpointError: a tensor of a quantised projection is broken.
        """
        for name in [name for name, _ in module.named_children()]:
            child = module.get_submodule(name)
            if isinstance(child, (QuantizedLinear, QuantizedExperts)):
                form = self._placed(self._forms.of_stored(child))
                if form is not None:
                    setattr(module, name, form)
                    continue
                self.num_bytes_dequantized += child.num_bytes_dequantized
                child = child.dequantized()
                setattr(module, name, child)
            if not isinstance(child, (Linear, Experts)):
                self.convert(child)
            elif (form := self._placed(self._forms.of_layer(child))) is not None:
                setattr(module, name, form)
        if isinstance(module, GatedMLP):
            fuse_quantisation(module)
        if isinstance(module, DecoderLayer):
            fuse_norms(module)

    def finish(self, read_head: Callable[[], IntegerWeight | None] = lambda: None) -> None:
        """Convert the layers that have not been, and the head.

        A tied head is a converted copy: the embedding needs plain rows. If all layers can be fused,
        the model runs them in one operation afterwards.

        Args:
            read_head: returns the integers that the checkpoint has for the head; None: it has none.

        Raises:
            UnsupportedError, CheckpointError: as `convert`.
        """
        model = self._model
        self.convert(model.model)
        own = model.lm_head if isinstance(model.lm_head, LMHead) else None
        rows = (own or model.model.embed_tokens).rows
        head = self._forms.of_stored_head(rows, read_head) or self._forms.of_head(rows)
        head = self._placed(head)
        if own is None:
            model.model.embed_tokens.head = head
        else:
            model.lm_head = head or own
        layers = [cast(DecoderLayer, layer) for layer in model.model.layers]
        if can_fuse(layers):
            model.model.fused = FusedLayers(layers, invariant=self._forms.deterministic)

    def _placed(self, form: nn.Module | None) -> nn.Module | None:
        if isinstance(form, PanelLinear):
            form.move(self._pages)
        return form


def num_bytes_while_loading(
    model: CausalLM,
    quantization: Quantization | None,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> int:
    """Return the most bytes that the weights of `model` take on `device` until it is converted.

    On a CPU, and with `quantization` on a GPU, each layer is converted when it has been loaded, and
    takes memory only from then on. On a GPU quantised weights of all layers are loaded first.

    Args:
        model: may be on the meta device.
    """
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    quantized = [
        module
        for module in model.modules()
        if isinstance(module, (QuantizedLinear, QuantizedExperts))
    ]
    forms = Forms(device, quantization, deterministic, ours=True)
    projections_of = [
        [
            module
            for module in layer.modules()
            if isinstance(module, (Linear, Experts, QuantizedLinear, QuantizedExperts))
        ]
        for layer in model.model.layers
    ]
    if device.type != "cpu":
        every = [module for projections in projections_of for module in projections]
        # All as it is stored, then all in its forms; an FP8 of floats is never all floats.
        more = sum(forms.num_bytes(module) - _num_bytes(module) for module in every)
        if quantization is None:
            more = max(more, 0)
        # A projection while it is unpacked, or read and quantised.
        return num_bytes + more + max(map(forms.num_bytes_while_converted, quantized), default=0)
    largest = 0
    for projections in projections_of:
        loaded = sum(map(_num_bytes, projections))
        largest = max(largest, loaded)
        num_bytes += sum(map(forms.num_bytes, projections)) - loaded
    # What a projection stands for is computed in float32.
    largest += 2 * max((module.num_bytes_dequantized for module in quantized), default=0)
    head = model.lm_head if isinstance(model.lm_head, LMHead) else model.model.embed_tokens
    return num_bytes + max(largest, forms.num_bytes_of_head(head.rows))


def _num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
