"""RMS normalisation, alone and with the residual addition."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.bench.case import ELEMENTWISE, LLAMA, MODELS, Case, Work, numel_bytes, randn
from kernels.rms_norm import rms_norm, rms_norm_add

_EPS = 1e-5


def _norm(tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> Work:
    x = randn(tokens, size, dtype=dtype, device=device)
    weight = randn(size, dtype=dtype, device=device, seed=1)
    form = partial(F.rms_norm, x, (size,), weight, _EPS)
    return Work(
        ours=partial(rms_norm, x, weight, _EPS),
        peers={"F.rms_norm": form},
        compiled={"compiled": form},
        bytes=2 * numel_bytes(x),
    )


def _norm_add(tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> Work:
    x = randn(tokens, size, dtype=dtype, device=device)
    residual = randn(tokens, size, dtype=dtype, device=device, seed=2)
    weight = randn(size, dtype=dtype, device=device, seed=1)
    form = partial(_torch_norm_add, x, residual, weight)
    return Work(
        ours=partial(rms_norm_add, x, residual, weight, _EPS),
        peers={"add, F.rms_norm": form},
        compiled={"compiled": form},
        bytes=4 * numel_bytes(x),
    )


def _torch_norm_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, _EPS), total


CASES = [
    Case(
        operation="rms_norm",
        name=f"{name} {model.label} {tokens}",
        build=build,
        shape={"tokens": tokens, "size": model.hidden, "dtype": torch.bfloat16},
        tiny={"tokens": 3, "size": 100, "dtype": torch.float32},
        aim=ELEMENTWISE if tokens == 8192 and model is LLAMA else None,
        compile=tokens == 8192,
    )
    for name, build in (("add", _norm_add), ("alone", _norm))
    for model in MODELS
    for tokens in (8192, 64, 1)
]
