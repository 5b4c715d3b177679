"""Forms of projections and experts on a GPU whose weights are quantised."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.coded_experts import CodedExperts
from engine.layers.coded_linear import CodedLinear
from engine.layers.fp8_linear import Fp8Gated, Fp8Linear, Fp8Norm
from engine.layers.linear import Gated, GatedLinear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.stored_weight import Fp8Weight, quantize_fp8
from engine.models.decoder import DecoderLayer
from engine.quantization.experts import QuantizedExperts
from engine.quantization.linear import QuantizedLinear
from kernels.device import multiplies_fp8

_FLOATS = (torch.bfloat16, torch.float16)


def stays_quantized(module: QuantizedLinear | QuantizedExperts) -> bool:
    """Return whether it has a form here, as far as it is known before it is loaded.

    In float32 no matrix instruction is exact.
    """
    return next(module.plain.parameters()).dtype in _FLOATS and module.stays_on_gpu


def form_of_stored(linear: QuantizedLinear, *, invariant: bool) -> nn.Module | None:
    """Return a product of the weight as the checkpoint stores it; None: there is none."""
    if not stays_quantized(linear):
        return None
    weight = linear.for_gpu()
    if weight is None:
        return None
    form: nn.Module
    bias = linear.ordered_bias
    if isinstance(weight, Fp8Weight):
        form = _of_fp8(weight, bias, invariant=invariant)
    else:
        form = CodedLinear(weight.packed(), bias, order=weight.order, invariant=invariant)
    plain = linear.plain
    return Gated(form, plain.activation) if isinstance(plain, GatedLinear) else form


def form_of_experts(experts: QuantizedExperts, *, invariant: bool) -> CodedExperts | None:
    """Return products of experts as the checkpoint stores them, widened; None: there are none."""
    codes = experts.for_gpu() if stays_quantized(experts) else None
    if codes is None:
        return None
    return CodedExperts(
        *codes,
        experts.gate_up_bias,
        experts.down_bias,
        activation=experts.plain.activation,
        invariant=invariant,
    )


def form_of_fp8(
    weight: Tensor, bias: Tensor | None, device: torch.device, *, invariant: bool
) -> nn.Module:
    """Return a product of what `weight` is in FP8, on `device`."""
    bias = None if bias is None else bias.to(device)
    return _of_fp8(quantize_fp8(weight.to(device)), bias, invariant=invariant)


def fuse_quantisation(mlp: GatedMLP) -> None:
    """Let the activation of a converted MLP quantise for a product of FP8 after it."""
    gated, down = mlp.gate_up_proj, mlp.down_proj
    if isinstance(gated, Gated) and isinstance(down, Fp8Linear):
        mlp.gate_up_proj = Fp8Gated(gated.projection, gated.activation, down)


def fuse_norms(layer: DecoderLayer) -> None:
    """Let the norms of a converted layer quantise for products of FP8, where nothing else reads."""
    qkv, mlp = layer.self_attn.qkv_proj, layer.mlp
    if layer.spec.norms == "parallel":
        return
    if isinstance(layer.attention_norm, RMSNorm) and isinstance(qkv, Fp8Linear):
        layer.attention_norm = Fp8Norm(layer.attention_norm, qkv)
    gated = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else None
    product = gated.projection if isinstance(gated, (Fp8Gated, Gated)) else None
    if isinstance(layer.mlp_norm, RMSNorm) and isinstance(product, Fp8Linear):
        layer.mlp_norm = Fp8Norm(layer.mlp_norm, product)


def _of_fp8(weight: Fp8Weight, bias: Tensor | None, *, invariant: bool) -> nn.Module:
    if multiplies_fp8(weight.codes.device):
        return Fp8Linear(weight, bias, invariant=invariant)
    return CodedLinear(weight.packed(), bias, invariant=invariant)
