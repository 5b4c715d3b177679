"""Products whose rows do not depend on each other, next to cuBLAS's."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from kernels.bench.case import MODELS, Case, Work, numel_bytes, randn
from kernels.matmul import matmul


def _linear(
    tokens: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device
) -> Work:
    x = randn(tokens, depth, dtype=dtype, device=device)
    weight = randn(columns, depth, dtype=dtype, device=device, seed=1) / depth**0.5
    return Work(
        ours=partial(matmul, x, weight, None),
        peers={"F.linear": partial(F.linear, x, weight)},
        bytes=numel_bytes(x, weight),
        flops=2 * tokens * columns * depth if tokens > 64 else 0,
    )


CASES = [
    Case(
        operation="matmul",
        name=f"{name} {model.label} {tokens}",
        build=_linear,
        shape={"tokens": tokens, "columns": columns, "depth": depth, "dtype": torch.bfloat16},
        tiny={"tokens": 3, "columns": 40, "depth": 64, "dtype": torch.float32},
    )
    for model in MODELS
    for name, columns, depth in (
        ("gate_up", 2 * model.inner, model.hidden),
        ("down", model.hidden, model.inner),
    )
    for tokens in (8192, 64, 1)
]
