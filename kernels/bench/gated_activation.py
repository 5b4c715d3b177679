"""Gated activations of an MLP, next to torch's and torch.compile's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.bench.case import ELEMENTWISE, LLAMA, MODELS, Case, Work, numel_bytes, randn
from kernels.gated_activation import gated_activation


def _silu(tokens: int, inner: int, dtype: torch.dtype, device: torch.device) -> Work:
    return _work(
        partial(gated_activation, activation="silu"), _torch_silu, tokens, inner, dtype, device
    )


def _gelu(tokens: int, inner: int, dtype: torch.dtype, device: torch.device) -> Work:
    return _work(
        partial(gated_activation, activation="gelu_tanh"), _torch_gelu, tokens, inner, dtype, device
    )


def _work(
    ours: Callable[..., Any],
    form: Callable[[Tensor], Tensor],
    tokens: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Work:
    gate_up = randn(tokens, 2 * inner, dtype=dtype, device=device)
    return Work(
        ours=partial(ours, gate_up),
        peers={"eager": partial(form, gate_up)},
        compiled={"compiled": partial(form, gate_up)},
        bytes=numel_bytes(gate_up) * 3 // 2,
    )


def _torch_silu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _torch_gelu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


CASES = [
    Case(
        operation="gated_activation",
        name=f"{name} {model.label} {tokens}",
        build=build,
        shape={"tokens": tokens, "inner": model.inner, "dtype": torch.bfloat16},
        tiny={"tokens": 3, "inner": 100, "dtype": torch.float32},
        aim=ELEMENTWISE if tokens == 8192 and model is LLAMA else None,
        compile=tokens == 8192 and model is LLAMA,
    )
    for name, build, model in (
        *(("silu", _silu, model) for model in MODELS),
        ("gelu", _gelu, LLAMA),
    )
    for tokens in (8192, 64, 1)
    if name == "silu" or tokens == 8192
]
