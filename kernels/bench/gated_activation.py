"""Gated activations of an MLP, next to torch's and torch.compile's."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.bench.case import MODELS, Work, by_tokens, numel_bytes, randn
from kernels.gated_activation import gated_activation


def _gated(tokens: int, inner: int, silu: bool, dtype: torch.dtype, device: torch.device) -> Work:
    gate_up = randn(tokens, 2 * inner, dtype=dtype, device=device)
    form = partial(_torch, gate_up, silu)
    return Work(
        ours=partial(gated_activation, gate_up, "silu" if silu else "gelu_tanh"),
        peers={"eager": form},
        compiled=form,
        bytes=numel_bytes(gate_up) * 3 // 2,
    )


def _torch(gate_up: Tensor, silu: bool) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if silu else F.gelu(gate, approximate="tanh")) * up


CASES = [
    case
    for name, models in (("silu", MODELS), ("gelu", MODELS[:1]))
    for case in by_tokens(
        "gated_activation",
        name,
        partial(_gated, silu=name == "silu"),
        lambda model: {"inner": model.inner},
        {"inner": 100},
        models=models,
        tokens=(8192, 64, 1) if name == "silu" else (8192,),
    )
]
