"""Mixtures of experts: routing, and all from the order to the sum, next to torch's.

torch's grouped product needs sorted rows; its form sorts, gathers, multiplies, and scatters back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.bench.kernels.case import Case, Work, numel_bytes, randn
from kernels.experts.activation import ExpertActivation
from kernels.experts.combine import combine
from kernels.experts.grouped_gemm import block_rows, expert_gated_linear, expert_linear
from kernels.experts.routing import route
from kernels.experts.sorting import sort_by_expert
from kernels.quantized.codes import Codes, expert, pack, stack, unpack

Sizes = tuple[int, int, int, int]  # inner and hidden, experts, and how many a token goes through
_MIXTURES = {
    "Qwen3-30B-A3B": (768, 2048, 128, 8),
    "Mixtral-8x7B": (14336, 4096, 8, 2),
    "gpt-oss-20b": (2880, 2880, 32, 4),
}
_TINY, _TINY_4 = ((24, 32), torch.float32), ((32, 64), torch.float16)


def _route(tokens: int, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Work:
    _, _, experts, top_k = sizes
    logits = randn(tokens, experts, dtype=dtype, device=device)
    return Work(
        ours=partial(route, logits, top_k, normalize=True),
        peers={"sort": partial(_torch_route, logits, top_k)},
        bytes=numel_bytes(logits) + tokens * top_k * 8,
    )


def _torch_route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    # Sorted stably: of equal logits of bfloat16, topk may choose others.
    chosen, experts = logits.float().sort(dim=-1, descending=True, stable=True)
    return experts[:, :top_k].to(torch.int32), chosen[:, :top_k].softmax(-1)


def _experts(
    tokens: int, sizes: Sizes, dtype: torch.dtype, device: torch.device, *, mxfp4: bool
) -> Work:
    """Experts of floats, or of 4 bits, next to the same widened to floats before."""
    inner, hidden, experts, top_k = sizes
    x = randn(tokens, hidden, dtype=dtype, device=device)
    logits = randn(tokens, experts, dtype=torch.float32, device=device, seed=3)
    chosen, weights = route(logits, top_k, normalize=True)
    shapes = ((2 * inner, hidden), (hidden, inner))
    ours: tuple[Any, Any]
    theirs: tuple[Tensor, Tensor]
    stored: Sequence[Tensor]
    if mxfp4:
        gate_up, down = (_random_mxfp4(experts, *shape, device) for shape in shapes)
        wide_gate_up, wide_down = (
            torch.stack([unpack(expert(codes, i)).to(dtype) for i in range(experts)])
            for codes in (gate_up, down)
        )
        order = torch.arange(2 * inner, device=device).view(2, inner).t().flatten()
        ours, theirs = (gate_up, down), (wide_gate_up[:, order], wide_down)
        stored = (gate_up.packed, gate_up.scale, down.packed, down.scale)
    else:
        first, second = (
            randn(experts, *shape, dtype=dtype, device=device, seed=seed) / shape[1] ** 0.5
            for seed, shape in enumerate(shapes, 1)
        )
        ours = theirs = stored = (first, second)
    flops = 2 * tokens * top_k * 3 * inner * hidden
    return Work(
        ours=partial(_ours, x, ours[0], ours[1], chosen, weights),
        peers={"grouped_mm": partial(_torch, x, *theirs, chosen, weights)},
        bytes=int(chosen.unique().numel()) * (numel_bytes(*stored) // experts) + 2 * numel_bytes(x),
        flops=flops if tokens * top_k > 64 * experts else 0,
    )


def _random_mxfp4(experts: int, rows: int, depth: int, device: torch.device) -> Codes:
    draw = torch.Generator(device).manual_seed(rows)

    def random(most: int, columns: int) -> Tensor:
        return torch.randint(0, most, (rows, columns), generator=draw, device=device)

    smallest = -3 - round(math.log2(depth) / 2)  # weights of about 1 / sqrt(depth)
    return stack(
        [
            pack(
                random(16, depth).to(torch.uint8),
                "e2m1",
                2.0 ** (smallest + random(4, depth // 32)),
            )
            for _ in range(experts)
        ]
    )


def _ours(
    x: Tensor,
    gate_up: Tensor | Codes,
    down: Tensor | Codes,
    experts: Tensor,
    weights: Tensor,
) -> Tensor:
    num_experts = len(gate_up.packed if isinstance(gate_up, Codes) else gate_up)
    totals = torch.zeros(num_experts, dtype=torch.int64, device=x.device)
    rows = block_rows(x.dtype, experts.numel(), num_experts)
    blocks = sort_by_expert(experts, totals, rows)
    inner = expert_gated_linear(
        x, gate_up, None, blocks, ExpertActivation(), top_k=experts.shape[1]
    )
    return combine(expert_linear(inner, down, None, blocks), experts, weights)


def _torch(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    top_k = experts.shape[1]
    owners, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(1, len(gate_up) + 1, dtype=torch.int32, device=x.device)
    ends = torch.searchsorted(owners, numbers, out_int32=True)
    projected = F.grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends)
    inner = F.silu(projected[:, ::2]) * projected[:, 1::2]
    each = F.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    each = each * weights.flatten()[order, None].to(x.dtype)
    by_choice = torch.empty_like(each).index_copy_(0, order, each).unflatten(0, (-1, top_k))
    out: Tensor = by_choice.sum(1)
    return out


CASES = [
    Case(
        operation="experts",
        name=f"{name} {label} {tokens}",
        build=build,
        shape={"tokens": tokens, "sizes": _MIXTURES[label], "dtype": torch.bfloat16},
        tiny={"tokens": 3, "sizes": (*tiny, *_MIXTURES[label][2:]), "dtype": dtype},
    )
    for name, build, tiny, dtype, labels, counts in (
        ("experts", partial(_experts, mxfp4=False), *_TINY, [*_MIXTURES], (8192, 64, 1)),
        ("route", _route, *_TINY, ["Qwen3-30B-A3B"], (64,)),
        ("mxfp4", partial(_experts, mxfp4=True), *_TINY_4, ["gpt-oss-20b"], (8192, 64, 1)),
    )
    for label in labels
    for tokens in counts
]
