"""Products whose rows do not depend on each other, next to cuBLAS's."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from kernels.bench.case import Work, by_tokens, numel_bytes, randn
from kernels.bench.shapes import Shape
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


def _sizes(name: str, model: Shape) -> dict[str, int]:
    columns, depth = model.projections[name]
    return {"columns": columns, "depth": depth}


CASES = [
    case
    for name in ("gate_up_proj", "down_proj")
    for case in by_tokens(
        *("matmul", name, _linear, partial(_sizes, name), {"columns": 40, "depth": 64}), aim=None
    )
]
