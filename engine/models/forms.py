"""Forms: which module replaces a loaded projection.

A form has the same `forward` as a `Linear`, and is made of its weight and bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.config.setting_types import Quantization
from engine.errors import UnsupportedError
from engine.layers.experts import Experts
from engine.layers.int8_linear import Int8Linear, multiplies_int8, quantize_channels
from engine.layers.integer_weight import (
    GroupedWeight,
    IntegerKind,
    IntegerWeight,
    quantize_groups,
)
from engine.layers.linear import Gated, GatedLinear, Linear
from engine.layers.moe import Router
from engine.layers.packed_linear import PackedLinear, can_pack
from engine.layers.panel_experts import PanelExperts
from engine.layers.panel_linear import PanelLinear
from engine.layers.tiled_linear import TiledLinear
from engine.models.gpu_forms import (
    form_of_experts,
    form_of_fp8,
    form_of_stored,
    stays_quantized,
)
from engine.quantization.experts import QuantizedExperts
from engine.quantization.linear import QuantizedLinear
from kernels.cpu import linear as panels
from kernels.cpu.activation import Activation
from kernels.device import has_triton

_CHANNELS = IntegerKind(8, None)
_GROUPS = IntegerKind(4, panels.GROUP)


@dataclass(frozen=True, slots=True)
class Forms:
    """Chooses the form of each projection; None for one that stays.

    Attributes:
        device: of the weights, which may be outlines on the meta device.
        quantization: what becomes of weights, but for those of routers. What 4 bits are not for,
            experts and rows that are no multiple of a group, gets 8. FP8 is for GPUs.
        deterministic: only forms with which a row does not depend on others.
        ours: our products serve where there are oneDNN's too; always with int4.
    """

    device: torch.device
    quantization: Quantization | None
    deterministic: bool
    ours: bool

    def of_layer(self, linear: Linear | Experts) -> nn.Module | None:
        if isinstance(linear, Experts):
            return self._of_experts(linear)
        weight, bias = linear.weight, linear.bias
        if isinstance(linear, Router):
            return replace(self, quantization=None).of_weight(weight, bias)
        if not isinstance(linear, GatedLinear):
            return self.of_weight(weight, bias)
        if self._in_panels(weight) and panels.can_gate(len(weight) // 2):
            return self._panels(self._quantized(weight), bias, activation=linear.activation)
        form = self.of_weight(weight, bias)
        return None if form is None else Gated(form, linear.activation)

    def of_head(self, rows: Tensor) -> nn.Module | None:
        """Return the form of the head, which computes logits in float32.

        Without rounding to bfloat16 in between, fewer of them are equal. It is never of 4 bits or
        FP8, whose error would be that of the logits.
        """
        in_8_bits: Quantization | None = None if self.quantization in (None, "fp8") else "int8"
        return replace(self, quantization=in_8_bits).of_weight(rows, None, wide=True)

    def of_stored_head(
        self, rows: Tensor, read: Callable[[], IntegerWeight | None]
    ) -> nn.Module | None:
        """Return the form of a head [vocab_size, hidden_size] of the integers of a checkpoint.

        Args:
            rows: the head in floating point.
            read: returns the integers; None: it has none.
        """
        if self.quantization == "int8" or rows.dtype == torch.float32 or not self._are_panels(rows):
            return None
        weight = read()
        if not isinstance(weight, GroupedWeight) or not weight.fits:
            return None
        assert weight.steps.shape == rows.shape
        return self._panels(weight, None, wide=True)

    def of_stored(self, linear: QuantizedLinear | QuantizedExperts) -> nn.Module | None:
        """Return a product of the weight as the checkpoint stores it, if there is one."""
        on_gpu = has_triton(self.device)
        if isinstance(linear, QuantizedExperts):
            return form_of_experts(linear, invariant=self.deterministic) if on_gpu else None
        if on_gpu:
            return form_of_stored(linear, invariant=self.deterministic)
        weight = linear.integers() if self._multiplies_stored(linear) else None
        if weight is None or not self._keeps(weight.kind):
            return None
        if isinstance(weight, GroupedWeight) and not weight.fits:
            return None
        plain = linear.plain
        activation = plain.activation if isinstance(plain, GatedLinear) else None
        return self._panels(weight, linear.ordered_bias, activation=activation)

    def of_weight(
        self, weight: Tensor, bias: Tensor | None, *, wide: bool = False
    ) -> nn.Module | None:
        if self.quantization == "fp8":
            return form_of_fp8(weight, bias, self.device, invariant=self.deterministic)
        if self._in_panels(weight):
            return self._panels(self._quantized(weight), bias, wide=wide)
        if self.deterministic:
            return TiledLinear(weight, bias, wide=wide)
        if self.quantization is not None:
            if not multiplies_int8():
                raise UnsupportedError(
                    f"quantization: {self.quantization} needs projections of a multiple of 4 "
                    f"inputs on this CPU (got {weight.shape[1]}); leave it out"
                )
            return Int8Linear(weight, bias)
        is_packed = not has_triton(self.device) and can_pack(weight.dtype)
        return PackedLinear(weight, bias) if is_packed else None

    def num_bytes(self, module: nn.Module) -> int:
        """Return the bytes of the form of a projection, its bias left out, at most."""
        if has_triton(self.device):
            return self._num_bytes_on_gpu(module)
        if isinstance(module, QuantizedLinear):
            kind = module.integer_kind
            if kind is not None and self._multiplies_stored(module) and self._keeps(kind):
                return kind.num_bytes(*module.plain.weight.shape)
        if isinstance(module, (QuantizedLinear, QuantizedExperts)):
            module = module.plain
        if isinstance(module, Experts):
            weights = (module.gate_up, module.down)
            return sum(w.numel() if self.quantization else w.nbytes for w in weights)
        assert isinstance(module, Linear)
        if self.quantization is None or isinstance(module, Router):
            return module.weight.nbytes
        return self._kind(module.weight).num_bytes(*module.weight.shape)

    def _num_bytes_on_gpu(self, module: nn.Module) -> int:
        if isinstance(module, (QuantizedLinear, QuantizedExperts)):
            if stays_quantized(module):
                return module.num_bytes_on_gpu
            return module.num_bytes_dequantized
        if self.quantization == "fp8" and not isinstance(module, (Router, Experts)):
            assert isinstance(module, Linear)
            return module.weight.numel() + 4 * len(module.weight)
        return sum(parameter.nbytes for parameter in module.parameters())

    def num_bytes_while_converted(self, module: QuantizedLinear | QuantizedExperts) -> int:
        """Return the bytes that it takes on a GPU to convert a projection, beside its form."""
        if isinstance(module, QuantizedExperts) and stays_quantized(module):
            # Each expert is packed alone; then all are in one tensor.
            one = 2 * module.num_bytes_dequantized // len(module.plain.down)
            return module.num_bytes_on_gpu + one
        return 2 * module.num_bytes_dequantized

    def num_bytes_of_head(self, rows: Tensor) -> int:
        """Return the bytes of the head's form on a CPU, at most."""
        return rows.nbytes if self.quantization is None else _CHANNELS.num_bytes(*rows.shape)

    def _of_experts(self, experts: Experts) -> nn.Module | None:
        # Also where oneDNN's products are faster: it has none of several experts at once.
        weight = experts.gate_up[0]
        is_packed = not has_triton(self.device) and panels.runs(weight, self.device)
        if is_packed and panels.can_gate(experts.down.shape[2]):
            return PanelExperts(experts, int8=self.quantization is not None)
        if self.quantization is not None:
            raise UnsupportedError(
                f"quantization: {self.quantization} is not for a mixture of experts on this "
                "device; leave it out"
            )
        experts.invariant = self.deterministic
        return None

    def _panels(
        self,
        weight: Tensor | IntegerWeight,
        bias: Tensor | None,
        *,
        activation: Activation | None = None,
        wide: bool = False,
    ) -> PanelLinear:
        invariant = self.deterministic
        return PanelLinear(weight, bias, activation=activation, wide=wide, invariant=invariant)

    def _kind(self, weight: Tensor) -> IntegerKind:
        is_in_groups = self.quantization == "int4" and weight.shape[1] % panels.GROUP == 0
        return _GROUPS if is_in_groups else _CHANNELS

    def _quantized(self, weight: Tensor) -> Tensor | IntegerWeight:
        if self.quantization is None:
            return weight
        if self._kind(weight) == _GROUPS:
            return quantize_groups(weight, panels.GROUP)
        return quantize_channels(weight)

    def _keeps(self, kind: IntegerKind) -> bool:
        """Return whether integers of a checkpoint stay what they are."""
        if kind.group_size is None:
            return self.quantization != "int4"
        if kind.group_size % panels.GROUP or self.quantization == "int8":
            return False
        return self.quantization is None or kind.bits == _GROUPS.bits

    def _multiplies_stored(self, linear: QuantizedLinear) -> bool:
        """Return whether there are products of integers for a projection of such a shape."""
        plain = linear.plain
        # In float32 activations are exact.
        if plain.weight.dtype == torch.float32 or not self._are_panels(plain.weight):
            return False
        return not isinstance(plain, GatedLinear) or panels.can_gate(len(plain.weight) // 2)

    def _in_panels(self, weight: Tensor) -> bool:
        is_ours = self.ours or self.deterministic or self.quantization == "int4"
        return is_ours and self._are_panels(weight)

    def _are_panels(self, weight: Tensor) -> bool:
        if has_triton(self.device):
            return False
        if self.deterministic:
            return panels.runs(weight, self.device)
        return panels.serves(weight, self.device)
