"""RMS and layer normalisation, alone and with the residual addition, next to torch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.bench.case import Work, by_tokens, numel_bytes, randn
from kernels.bench.shapes import LLAMA_8B
from kernels.layer_norm import layer_norm, layer_norm_add
from kernels.rms_norm import rms_norm, rms_norm_add

_EPS = 1e-5


def _norm(
    tokens: int, size: int, dtype: torch.dtype, device: torch.device, *, kind: str, add: bool
) -> Work:
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
    form = partial(_torch, theirs, inputs, parameters)
    return Work(
        ours=partial(ours, *inputs, *parameters, _EPS),
        peers={f"F.{kind}": form},
        compiled=form,
        bytes=2 * numel_bytes(*inputs),
    )


def _torch(norm: Any, inputs: tuple[Tensor, ...], parameters: list[Tensor]) -> Any:
    total = inputs[0] + inputs[1] if len(inputs) > 1 else inputs[0]
    out = norm(total, total.shape[-1:], *parameters, _EPS)
    return (out, total) if len(inputs) > 1 else out


CASES = [
    case
    for kind in ("rms_norm", "layer_norm")
    for name in ("add", "alone")
    for case in by_tokens(
        kind,
        name,
        partial(_norm, kind=kind, add=name == "add"),
        lambda model: {"size": model.hidden},
        {"size": 100},
        models=(LLAMA_8B,),
    )
]
