"""Selects the linear method for each loaded projection: which module multiplies its weight.

The module has the same `forward` as a `Linear`, and is made of its weight and bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.config.setting_types import Quantization
from engine.errors import UnsupportedError
from engine.layers.cpu_packed_experts import CpuPackedExperts
from engine.layers.experts import Experts
from engine.layers.integer_weight import GroupedWeight, IntegerKind, IntegerWeight, quantize_groups
from engine.layers.linear.batch_invariant import BatchInvariantLinear
from engine.layers.linear.cpu_packed import CpuPackedLinear
from engine.layers.linear.fp8 import Fp8Gated, Fp8Linear, Fp8Norm
from engine.layers.linear.int8 import Int8Linear, multiplies_int8, quantize_channels
from engine.layers.linear.linear import FloatLinear, Gated, GatedLinear, Linear
from engine.layers.linear.onednn import OneDnnLinear, can_pack
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.stored_weight import Fp8Weight, quantize_fp8
from engine.layers.wna16 import WNA16Experts, WNA16Linear
from engine.models.decoder import DecoderLayer
from engine.quantization.experts import QuantizedExperts
from engine.quantization.linear import QuantizedLinear
from kernels.cpu import linear as cpu_gemm
from kernels.cpu.activation import Activation
from kernels.device import has_triton, multiplies_fp8

_CHANNELS = IntegerKind(8, None)
_GROUPS = IntegerKind(4, cpu_gemm.GROUP)


@dataclass(frozen=True, slots=True)
class LinearMethods:
    """Selects the module for each projection; None for one that stays as it is.

    Attributes:
        device: of the weights, which may be outlines on the meta device.
        quantization: what becomes of weights, but for those of routers. What 4 bits are not for,
            experts and rows that are no multiple of a group, gets 8. FP8 is for GPUs.
        deterministic: only modules with which a row does not depend on others.
        own_gemm: ours serves where there is oneDNN's too; always with int4.
    """

    device: torch.device
    quantization: Quantization | None
    deterministic: bool
    own_gemm: bool

    def of_layer(self, linear: Linear | Experts) -> nn.Module | None:
        if isinstance(linear, Experts):
            return self._of_experts(linear)
        weight, bias = linear.weight, linear.bias
        if isinstance(linear, FloatLinear):
            return replace(self, quantization=None).of_weight(weight, bias)
        if not isinstance(linear, GatedLinear):
            return self.of_weight(weight, bias)
        if self._is_cpu_packed(weight) and cpu_gemm.can_gate(len(weight) // 2):
            return self._cpu_packed(self._quantized(weight), bias, activation=linear.activation)
        method = self.of_weight(weight, bias)
        return None if method is None else Gated(method, linear.activation)

    def of_head(self, rows: Tensor) -> nn.Module | None:
        """Return the module of the head, which computes logits in float32.

        Without rounding to bfloat16 in between, fewer of them are equal. It is never of 4 bits or
        FP8, whose error would be that of the logits.
        """
        in_8_bits: Quantization | None = None if self.quantization in (None, "fp8") else "int8"
        return replace(self, quantization=in_8_bits).of_weight(rows, None, wide=True)

    def of_stored_head(
        self, rows: Tensor, read: Callable[[], IntegerWeight | None]
    ) -> nn.Module | None:
        """Return a head [vocab_size, hidden_size] of the integers of a checkpoint.

        Args:
            rows: the head in floating point.
            read: returns the integers; None: it has none.
        """
        if (
            self.quantization == "int8"
            or rows.dtype == torch.float32
            or not self._can_be_cpu_packed(rows)
        ):
            return None
        weight = read()
        if not isinstance(weight, GroupedWeight) or not weight.fits:
            return None
        assert weight.steps.shape == rows.shape
        return self._cpu_packed(weight, None, wide=True)

    def of_stored(self, linear: QuantizedLinear | QuantizedExperts) -> nn.Module | None:
        """Return a module that multiplies the weight as it is stored; None: there is none."""
        on_gpu = has_triton(self.device)
        if isinstance(linear, QuantizedExperts):
            return gpu_experts_of_stored(linear, invariant=self.deterministic) if on_gpu else None
        if on_gpu:
            return gpu_linear_of_stored(linear, invariant=self.deterministic)
        weight = linear.integers() if self._multiplies_stored(linear) else None
        if weight is None or not self._keeps(weight.kind):
            return None
        if isinstance(weight, GroupedWeight) and not weight.fits:
            return None
        plain = linear.plain
        activation = plain.activation if isinstance(plain, GatedLinear) else None
        return self._cpu_packed(weight, linear.ordered_bias, activation=activation)

    def of_weight(
        self, weight: Tensor, bias: Tensor | None, *, wide: bool = False
    ) -> nn.Module | None:
        if self.quantization == "fp8":
            return fp8_linear(weight, bias, self.device, invariant=self.deterministic)
        if self._is_cpu_packed(weight):
            return self._cpu_packed(self._quantized(weight), bias, wide=wide)
        if self.deterministic:
            return BatchInvariantLinear(weight, bias, wide=wide)
        if self.quantization is not None:
            if not multiplies_int8():
                raise UnsupportedError(
                    f"{self.quantization} needs projections with a multiple of 4 inputs on "
                    f"this CPU (got {weight.shape[1]}); leave it out",
                    param="quantization",
                )
            return Int8Linear(weight, bias)
        is_packed = not has_triton(self.device) and can_pack(weight.dtype)
        return OneDnnLinear(weight, bias) if is_packed else None

    def num_bytes(self, module: nn.Module) -> int:
        """Return the most bytes of the module for a projection, its bias left out."""
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
        if self.quantization is None or isinstance(module, FloatLinear):
            return module.weight.nbytes
        return self._kind(module.weight).num_bytes(*module.weight.shape)

    def _num_bytes_on_gpu(self, module: nn.Module) -> int:
        if isinstance(module, (QuantizedLinear, QuantizedExperts)):
            if stays_quantized(module):
                return module.num_bytes_on_gpu
            return module.num_bytes_dequantized
        if self.quantization == "fp8" and not isinstance(module, (FloatLinear, Experts)):
            assert isinstance(module, Linear)
            return module.weight.numel() + 4 * len(module.weight)
        return sum(parameter.nbytes for parameter in module.parameters())

    def num_bytes_while_processed(self, module: QuantizedLinear | QuantizedExperts) -> int:
        """Return the bytes that it takes on a GPU to process a projection, beside the result."""
        if isinstance(module, QuantizedExperts) and stays_quantized(module):
            # Each expert is packed alone; then all are in one tensor.
            one = 2 * module.num_bytes_dequantized // len(module.plain.down)
            return module.num_bytes_on_gpu + one
        return 2 * module.num_bytes_dequantized

    def num_bytes_of_head(self, rows: Tensor) -> int:
        """Return the most bytes of the head's module on a CPU."""
        return rows.nbytes if self.quantization is None else _CHANNELS.num_bytes(*rows.shape)

    def _of_experts(self, experts: Experts) -> nn.Module | None:
        # Also where oneDNN's GEMM is faster: it has none of several experts at once.
        weight = experts.gate_up[0]
        is_packed = not has_triton(self.device) and cpu_gemm.runs(weight, self.device)
        if is_packed and cpu_gemm.can_gate(experts.down.shape[2]):
            return CpuPackedExperts(experts, int8=self.quantization is not None)
        if self.quantization is not None:
            raise UnsupportedError(
                f"{self.quantization} is not supported for a mixture of experts on this device; "
                "leave it out",
                param="quantization",
            )
        experts.invariant = self.deterministic
        return None

    def _cpu_packed(
        self,
        weight: Tensor | IntegerWeight,
        bias: Tensor | None,
        *,
        activation: Activation | None = None,
        wide: bool = False,
    ) -> CpuPackedLinear:
        invariant = self.deterministic
        return CpuPackedLinear(weight, bias, activation=activation, wide=wide, invariant=invariant)

    def _kind(self, weight: Tensor) -> IntegerKind:
        is_in_groups = self.quantization == "int4" and weight.shape[1] % cpu_gemm.GROUP == 0
        return _GROUPS if is_in_groups else _CHANNELS

    def _quantized(self, weight: Tensor) -> Tensor | IntegerWeight:
        if self.quantization is None:
            return weight
        if self._kind(weight) == _GROUPS:
            return quantize_groups(weight, cpu_gemm.GROUP)
        return quantize_channels(weight)

    def _keeps(self, kind: IntegerKind) -> bool:
        """Return whether integers of a checkpoint stay what they are."""
        if kind.group_size is None:
            return self.quantization != "int4"
        if kind.group_size % cpu_gemm.GROUP or self.quantization == "int8":
            return False
        return self.quantization is None or kind.bits == _GROUPS.bits

    def _multiplies_stored(self, linear: QuantizedLinear) -> bool:
        """Return whether there is a GEMM of integers for a projection of such a shape."""
        plain = linear.plain
        # In float32 activations are exact.
        if plain.weight.dtype == torch.float32 or not self._can_be_cpu_packed(plain.weight):
            return False
        return not isinstance(plain, GatedLinear) or cpu_gemm.can_gate(len(plain.weight) // 2)

    def _is_cpu_packed(self, weight: Tensor) -> bool:
        is_ours = self.own_gemm or self.deterministic or self.quantization == "int4"
        return is_ours and self._can_be_cpu_packed(weight)

    def _can_be_cpu_packed(self, weight: Tensor) -> bool:
        if has_triton(self.device):
            return False
        if self.deterministic:
            return cpu_gemm.runs(weight, self.device)
        return cpu_gemm.serves(weight, self.device)


_FLOATS = (torch.bfloat16, torch.float16)


def stays_quantized(module: QuantizedLinear | QuantizedExperts) -> bool:
    """Return whether its weight stays quantised on a GPU, as far as is known before it is loaded.

    In float32 no matrix instruction is exact.
    """
    return next(module.plain.parameters()).dtype in _FLOATS and module.stays_on_gpu


def gpu_linear_of_stored(linear: QuantizedLinear, *, invariant: bool) -> nn.Module | None:
    """Return a module that multiplies the stored weight on a GPU; None: there is none."""
    if not stays_quantized(linear):
        return None
    weight = linear.for_gpu()
    if weight is None:
        return None
    method: nn.Module
    bias = linear.ordered_bias
    if isinstance(weight, Fp8Weight):
        method = _of_fp8(weight, bias, invariant=invariant)
    else:
        method = WNA16Linear(weight.packed(), bias, order=weight.order, invariant=invariant)
    plain = linear.plain
    return Gated(method, plain.activation) if isinstance(plain, GatedLinear) else method


def gpu_experts_of_stored(experts: QuantizedExperts, *, invariant: bool) -> WNA16Experts | None:
    """Return experts of the stored weights, widened on a GPU; None: there are none."""
    codes = experts.for_gpu() if stays_quantized(experts) else None
    if codes is None:
        return None
    return WNA16Experts(
        *codes,
        experts.gate_up_bias,
        experts.down_bias,
        activation=experts.plain.activation,
        invariant=invariant,
    )


def fp8_linear(
    weight: Tensor, bias: Tensor | None, device: torch.device, *, invariant: bool
) -> nn.Module:
    """Return a linear of `weight` quantised to FP8, on `device`."""
    bias = None if bias is None else bias.to(device)
    return _of_fp8(quantize_fp8(weight.to(device)), bias, invariant=invariant)


def fuse_quantisation(mlp: GatedMLP) -> None:
    """Let the activation of a processed MLP quantise for an FP8 GEMM after it."""
    gated, down = mlp.gate_up_proj, mlp.down_proj
    if isinstance(gated, Gated) and isinstance(down, Fp8Linear):
        mlp.gate_up_proj = Fp8Gated(gated.projection, gated.activation, down)


def fuse_norms(layer: DecoderLayer) -> None:
    """Let the norms of a processed layer quantise for FP8 GEMMs, where nothing else reads them."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = None if attention is None else attention.qkv_proj
    if layer.spec.norms == "parallel":
        return
    if isinstance(layer.attention_norm, RMSNorm) and isinstance(qkv, Fp8Linear):
        layer.attention_norm = Fp8Norm(layer.attention_norm, qkv)
    gated = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else None
    linear = gated.projection if isinstance(gated, (Fp8Gated, Gated)) else None
    if isinstance(layer.mlp_norm, RMSNorm) and isinstance(linear, Fp8Linear):
        layer.mlp_norm = Fp8Norm(layer.mlp_norm, linear)


def _of_fp8(weight: Fp8Weight, bias: Tensor | None, *, invariant: bool) -> nn.Module:
    if multiplies_fp8(weight.codes.device):
        return Fp8Linear(weight, bias, invariant=invariant)
    return WNA16Linear(weight.packed(), bias, invariant=invariant)
