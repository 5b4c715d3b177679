"""Mixtures of experts: routing, and all from the order to the sum, next to torch's.

torch's grouped product needs sorted rows; its form sorts, gathers, multiplies, and scatters back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.bench.case import Case, Work, numel_bytes, randn
from kernels.experts.activation import ExpertActivation
from kernels.experts.combine import combine
from kernels.experts.product_kernel import block_rows
from kernels.experts.products import expert_gated_linear, expert_linear
from kernels.experts.routing import route
from kernels.experts.sorting import sort_by_expert


@dataclass(frozen=True, slots=True)
class Mixture:
    """The shapes of a model's experts."""

    label: str
    hidden: int
    inner: int
    experts: int
    top_k: int


MIXTURES = (
    Mixture("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Mixture("Mixtral-8x7B", 4096, 14336, 8, 2),
    Mixture("gpt-oss-20b", 2880, 2880, 32, 4),
)


def _route(
    tokens: int, mixture: Mixture, inner: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> Work:
    logits = randn(tokens, mixture.experts, dtype=dtype, device=device)
    return Work(
        ours=partial(route, logits, mixture.top_k, normalize=True),
        peers={"topk": partial(_torch_route, logits, mixture.top_k)},
        bytes=numel_bytes(logits) + tokens * mixture.top_k * 8,
    )


def _torch_route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    # Sorted stably: of equal logits of bfloat16, topk may choose others.
    chosen, experts = logits.float().sort(dim=-1, descending=True, stable=True)
    return experts[:, :top_k].to(torch.int32), chosen[:, :top_k].softmax(-1)


def _experts(
    tokens: int, mixture: Mixture, inner: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> Work:
    num, top_k = mixture.experts, mixture.top_k
    x = randn(tokens, hidden, dtype=dtype, device=device)
    gate_up = randn(num, 2 * inner, hidden, dtype=dtype, device=device, seed=1) / hidden**0.5
    down = randn(num, hidden, inner, dtype=dtype, device=device, seed=2) / inner**0.5
    logits = randn(tokens, num, dtype=torch.float32, device=device, seed=3)
    experts, weights = route(logits, top_k, normalize=True)
    read = int(experts.unique().numel()) * 3 * inner * hidden * dtype.itemsize
    flops = 2 * tokens * top_k * 3 * inner * hidden
    return Work(
        ours=partial(_ours, x, gate_up, down, experts, weights),
        peers={"grouped_mm": partial(_torch, x, gate_up, down, experts, weights)},
        bytes=read + 2 * numel_bytes(x),
        flops=flops if tokens * top_k > 64 * num else 0,
    )


def _ours(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    totals = torch.zeros(len(gate_up), dtype=torch.int64, device=x.device)
    rows = block_rows(x.dtype, experts.numel(), len(gate_up))
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
    product = F.grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends)
    inner = F.silu(product[:, ::2]) * product[:, 1::2]
    each = F.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    each = each * weights.flatten()[order, None].to(x.dtype)
    by_choice = torch.empty_like(each).index_copy_(0, order, each).unflatten(0, (-1, top_k))
    out: Tensor = by_choice.sum(1)
    return out


CASES = [
    Case(
        operation="experts",
        name=f"{name} {mixture.label} {tokens}",
        build=build,
        shape={
            "tokens": tokens,
            "mixture": mixture,
            "inner": mixture.inner,
            "hidden": mixture.hidden,
            "dtype": torch.bfloat16,
        },
        tiny={"tokens": 3, "inner": 24, "hidden": 32, "dtype": torch.float32},
    )
    for mixture in MIXTURES
    for name, build in (("experts", _experts), ("route", _route))
    for tokens in (8192, 64, 1)
    if name == "experts" or (tokens == 64 and mixture is MIXTURES[0])
]
