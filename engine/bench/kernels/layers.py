"""What a layer does beside attention, next to torch's.

Norms, alone and with the residual addition; gated activations; rotary embedding with the KV cache
write; products whose rows do not depend on each other, and of a single row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.bench.kernels.case import MODELS, Work, by_tokens, numel_bytes, randn
from engine.bench.kernels.shapes import Shape
from kernels.attention.paged_cache import FP8
from kernels.gated_activation import gated_activation
from kernels.gemv import linear
from kernels.layer_norm import layer_norm, layer_norm_add
from kernels.matmul import matmul
from kernels.rms_norm import rms_norm, rms_norm_add
from kernels.rotary import rotary_and_cache

_BLOCK_SIZE = 16
_EPS = 1e-5


def _gated(
    tokens: int, model: Shape, dtype: torch.dtype, device: torch.device, *, silu: bool
) -> Work:
    gate_up = randn(tokens, 2 * model.inner, dtype=dtype, device=device)
    form = partial(_torch_gated, gate_up, silu)
    return Work(
        ours=partial(gated_activation, gate_up, "silu" if silu else "gelu_tanh"),
        peers={"eager": form},
        compiled=form,
        bytes=numel_bytes(gate_up) * 3 // 2,
    )


def _torch_gated(gate_up: Tensor, silu: bool) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if silu else F.gelu(gate, approximate="tanh")) * up


def _rotary(
    tokens: int, model: Shape, dtype: torch.dtype, device: torch.device, *, float8: bool
) -> Work:
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    # Views of one fused projection, as in the model.
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    fused = randn(tokens, sum(sizes), dtype=dtype, device=device).split(sizes, dim=-1)
    query, key, value = (part.unflatten(-1, (-1, dim)) for part in fused)
    angles = randn(tokens, dim // 2, dtype=torch.float32, device=device, seed=1)
    blocks = -(-tokens // _BLOCK_SIZE) + 1
    shape = (2, blocks, _BLOCK_SIZE, kv_heads, dim)
    caches = torch.zeros(shape, dtype=FP8 if float8 else dtype, device=device).unbind()
    key_cache, value_cache = caches
    order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)).to(device) + 1
    position = torch.arange(tokens, device=device)
    slots = order[position // _BLOCK_SIZE] * _BLOCK_SIZE + position % _BLOCK_SIZE
    scales = torch.full((2, kv_heads), 0.02, device=device).unbind() if float8 else (None, None)
    arguments = (query, key, value, angles.cos(), angles.sin(), key_cache, value_cache, slots)
    form = partial(_torch_rotary, *arguments, scales)
    written = numel_bytes(query) + 2 * key.numel() * caches[0].element_size()
    return Work(
        ours=partial(rotary_and_cache, *arguments, key_scale=scales[0], value_scale=scales[1]),
        peers={"eager": form},
        compiled=form,
        bytes=numel_bytes(query, key, value, angles, angles, slots) + written,
        written=caches,
    )


def _torch_rotary(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    scales: tuple[Tensor | None, ...],
) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    caches, rows = (key_cache, value_cache), (rotate(key), value.float())
    for cache, row, scale in zip(caches, rows, scales, strict=True):
        if scale is not None:
            row = (row / scale[:, None]).clamp(-448, 448)
        # As bytes: index_copy_ does not support float8.
        stored = row.to(cache.dtype).view(torch.uint8)
        cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, stored)
    return rotate(query).to(query.dtype)


def _linear(
    tokens: int,
    model: Shape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    name: str,
    gemm: Callable[[Tensor, Tensor, None], Tensor],
) -> Work:
    columns, depth = model.projections[name]
    x = randn(tokens, depth, dtype=dtype, device=device)
    weight = randn(columns, depth, dtype=dtype, device=device, seed=1) / depth**0.5
    return Work(
        ours=partial(gemm, x, weight, None),
        peers={"F.linear": partial(F.linear, x, weight)},
        bytes=numel_bytes(x, weight),
        flops=2 * tokens * columns * depth if tokens > 64 else 0,
    )


def _norm(
    tokens: int, model: Shape, dtype: torch.dtype, device: torch.device, *, kind: str, add: bool
) -> Work:
    size = model.hidden
    x, residual = (randn(tokens, size, dtype=dtype, device=device, seed=i) for i in (0, 1))
    parameters = [randn(size, dtype=dtype, device=device, seed=i) for i in (2, 3)]
    ours: Any
    theirs: Any
    if kind == "rms_norm":
        parameters, theirs = parameters[:1], F.rms_norm
        ours = rms_norm_add if add else rms_norm
    else:
        theirs = F.layer_norm
        ours = layer_norm_add if add else layer_norm
    inputs = (x, residual) if add else (x,)
    form = partial(_torch_norm, theirs, inputs, parameters)
    return Work(
        ours=partial(ours, *inputs, *parameters, _EPS),
        peers={f"F.{kind}": form},
        compiled=form,
        bytes=2 * numel_bytes(*inputs),
    )


def _torch_norm(norm: Any, inputs: tuple[Tensor, ...], parameters: list[Tensor]) -> Any:
    total = inputs[0] + inputs[1] if len(inputs) > 1 else inputs[0]
    out = norm(total, total.shape[-1:], *parameters, _EPS)
    return (out, total) if len(inputs) > 1 else out


_CASES: tuple[tuple[str, str, partial[Work], dict[str, Any]], ...] = (
    *(
        (kind, name, partial(_norm, kind=kind, add=name == "add"), {"models": MODELS[:1]})
        for kind in ("rms_norm", "layer_norm")
        for name in ("add", "alone")
    ),
    ("gated_activation", "silu", partial(_gated, silu=True), {}),
    (
        *("gated_activation", "gelu", partial(_gated, silu=False)),
        {"models": MODELS[:1], "tokens": (8192,)},
    ),
    ("rotary", "bf16", partial(_rotary, float8=False), {}),
    ("rotary", "fp8", partial(_rotary, float8=True), {"models": MODELS[:1]}),
    *(
        ("matmul", name, partial(_linear, name=name, gemm=matmul), {"aim": None})
        for name in ("gate_up_proj", "down_proj")
    ),
    *(
        (
            *("gemv", name, partial(_linear, name=name, gemm=linear)),
            {"tokens": (1,), "tiny": {"tokens": 1}},
        )
        for name in ("qkv_proj", "down_proj")
    ),
)
CASES = [
    case
    for operation, name, build, some in _CASES
    for case in by_tokens(operation, name, build, **some)
]
