"""Layer normalisation, alone and with the residual addition, next to torch's."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.bench.case import ELEMENTWISE, LLAMA, Case, Work, numel_bytes, randn
from kernels.layer_norm import layer_norm, layer_norm_add

_EPS = 1e-5


def _norm(tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> Work:
    x, _, weight, bias = _tensors(tokens, size, dtype, device)
    form = partial(F.layer_norm, x, (size,), weight, bias, _EPS)
    return Work(
        ours=partial(layer_norm, x, weight, bias, _EPS),
        peers={"F.layer_norm": form},
        compiled={"compiled": form},
        bytes=2 * numel_bytes(x),
    )


def _norm_add(tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> Work:
    x, residual, weight, bias = _tensors(tokens, size, dtype, device)
    form = partial(_torch_norm_add, x, residual, weight, bias)
    return Work(
        ours=partial(layer_norm_add, x, residual, weight, bias, _EPS),
        peers={"add, F.layer_norm": form},
        compiled={"compiled": form},
        bytes=4 * numel_bytes(x),
    )


def _torch_norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, _EPS), total


def _tensors(
    tokens: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, residual, weight and bias."""
    x = randn(tokens, size, dtype=dtype, device=device)
    residual = randn(tokens, size, dtype=dtype, device=device, seed=1)
    weight = randn(size, dtype=dtype, device=device, seed=2)
    return x, residual, weight, randn(size, dtype=dtype, device=device, seed=3)


CASES = [
    Case(
        operation="layer_norm",
        name=f"{name} {LLAMA.hidden} {tokens}",
        build=build,
        shape={"tokens": tokens, "size": LLAMA.hidden, "dtype": torch.bfloat16},
        tiny={"tokens": 3, "size": 100, "dtype": torch.float32},
        aim=ELEMENTWISE if tokens == 8192 else None,
        compile=tokens == 8192,
    )
    for name, build in (("add", _norm_add), ("alone", _norm))
    for tokens in (8192, 64, 1)
]
