"""Mixtures of experts, next to every expert for every token."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.bench.case import Case, Work, numel_bytes, randn
from kernels.experts import experts

# Experts, experts per token, hidden size, size of an expert.
MODELS = {
    "Mixtral-8x7B": {"num_experts": 8, "top_k": 2, "hidden": 4096, "inner": 14336},
    "Qwen3-30B-A3B": {"num_experts": 128, "top_k": 8, "hidden": 2048, "inner": 768},
}


def _experts(
    tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Work:
    x = randn(tokens, hidden, dtype=dtype, device=device)
    gate_up = randn(num_experts, 2 * inner, hidden, dtype=dtype, device=device, seed=1)
    gate_up /= hidden**0.5
    down = randn(num_experts, hidden, inner, dtype=dtype, device=device, seed=2) / inner**0.5
    scores = randn(tokens, num_experts, dtype=torch.float32, device=device, seed=3).softmax(-1)
    weights, ids = scores.topk(top_k, dim=-1)
    num_chosen = len(ids.unique())
    return Work(
        ours=partial(experts, x, gate_up, down, ids, weights, "silu"),
        peers={"every expert": partial(_every_expert, x, gate_up, down, ids, weights)},
        bytes=numel_bytes(x) * 2 + numel_bytes(gate_up, down) * num_chosen // num_experts,
        flops=6 * tokens * top_k * hidden * inner if tokens > 64 else 0,
    )


def _every_expert(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute all experts for all tokens, in a number of launches that a CUDA graph can hold."""
    shares = torch.zeros(len(x), len(gate_up), device=x.device).scatter_(1, ids, weights)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(gate_up)):
        gate, up = F.linear(x, gate_up[expert]).chunk(2, dim=-1)
        out += shares[:, expert, None] * F.linear(F.silu(gate) * up, down[expert]).float()
    return out.to(x.dtype)


CASES = [
    Case(
        operation="experts",
        name=f"{name} {tokens}",
        build=_experts,
        shape={"tokens": tokens, **model, "dtype": torch.bfloat16},
        tiny={
            "tokens": 3,
            "num_experts": 4,
            "top_k": 2,
            "hidden": 40,
            "inner": 24,
            "dtype": torch.float32,
        },
    )
    for name, model in MODELS.items()
    for tokens in (8192, 64, 1)
]
