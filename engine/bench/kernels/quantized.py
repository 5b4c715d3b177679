"""Products with quantised weights, next to torch's with the weights that they stand for.

Few tokens are bound by reading the weight: the aims are shares of the copy bandwidth of its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.bench.kernels.case import SMALL, Aim, Case, Work, by_tokens, numel_bytes, randn
from engine.bench.kernels.shapes import LLAMA_8B, Shape
from kernels.quantized.codes import Kind, pack, unpack
from kernels.quantized.fp8_gemm import GROUP, fp8_linear
from kernels.quantized.gated_rows import gated_rows
from kernels.quantized.normed_rows import normed_rows
from kernels.quantized.rows import quantize_rows, reference
from kernels.quantized.splits import MOST_SPLIT
from kernels.quantized.wna16_gemm import wna16_linear

_AIMS = {"fp8": Aim(share=0.75), "int4": Aim(share=0.6)}


def _rows(tokens: int, model: Shape, dtype: torch.dtype, device: torch.device) -> Work:
    x = randn(tokens, model.hidden, dtype=dtype, device=device)
    return _quantizing(quantize_rows, reference, x, size=model.hidden)


def _gated(tokens: int, model: Shape, dtype: torch.dtype, device: torch.device) -> Work:
    x = randn(tokens, 2 * model.inner, dtype=dtype, device=device)

    def unfused(x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = x.float().chunk(2, -1)
        return reference((F.silu(gate) * up).to(x.dtype))

    def ours(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = gated_rows(x, "silu", group=None)
        return codes, scales[:, 0]

    return _quantizing(ours, unfused, x, size=model.inner)


def _normed(tokens: int, model: Shape, dtype: torch.dtype, device: torch.device) -> Work:
    size = model.hidden
    x, residual = (randn(tokens, size, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = randn(size, dtype=dtype, device=device, seed=2)

    def unfused(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return reference(F.rms_norm(x + residual, (size,), weight, 1e-5))

    def ours(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales, _ = normed_rows(x, residual, weight, 1e-5, unit_offset=False, group=None)
        return codes, scales[:, 0]

    # The sum is written too.
    return _quantizing(ours, unfused, x, residual, size=size, written=numel_bytes(x))


def _quantizing(
    ours: Callable[..., Any], torchs: Callable[..., Any], *rows: Tensor, size: int, written: int = 0
) -> Work:
    """Return work on `rows` that writes as many of `size` codes, a scale each, and `written`."""
    codes = len(rows[0]) * (size + 4)
    return Work(
        ours=partial(ours, *rows),
        peers={"torch": partial(torchs, *rows)},
        compiled=partial(torchs, *rows),
        bytes=numel_bytes(*rows) + codes + written,
    )


def _fp8(
    tokens: int, sizes: tuple[int, int], in_blocks: bool, dtype: torch.dtype, device: torch.device
) -> Work:
    columns, depth = sizes
    group = GROUP if in_blocks else depth
    x, weight = (
        randn(rows, depth, dtype=dtype, device=device, seed=rows) for rows in (tokens, columns)
    )
    (x, x_scale), (weight, weight_scale) = (_quantized(each, group) for each in (x, weight))
    if in_blocks:
        weight_scale = weight_scale[::GROUP].contiguous()
    rows = columns // len(weight_scale)
    wide_x = _widened(x, x_scale, group, dtype)
    wide_weight = _widened(weight, weight_scale.repeat_interleave(rows, 0), group, dtype)
    return Work(
        ours=partial(fp8_linear, x, x_scale, weight, weight_scale, None, dtype),
        peers={"F.linear": partial(F.linear, wide_x, wide_weight)},
        bytes=numel_bytes(x, weight, x_scale, weight_scale),
        flops=2 * tokens * columns * depth if tokens > MOST_SPLIT else 0,
    )


def _quantized(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    codes, scale = quantize_rows(rows.view(-1, group))
    return codes.view(rows.shape), scale.view(len(rows), -1)


def _widened(codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scale.repeat_interleave(group, 1)).to(dtype)


def _wna16(
    tokens: int,
    sizes: tuple[int, int],
    kind: Kind,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Work:
    columns, depth = sizes
    x = randn(tokens, depth, dtype=dtype, device=device)
    shape = columns, depth // group
    scale = (1 + randn(*shape, dtype=torch.float32, device=device).sigmoid()) / depth**0.5 / 8
    scale = scale.half().float()
    draw = torch.Generator(device).manual_seed(1)
    steps = torch.randint(0, 16, (columns, depth), generator=draw, device=device)
    zeros = torch.randint(0, 16, shape, generator=draw, device=device)
    weight = pack(
        steps.to(torch.uint8),
        kind,
        scale,
        -zeros * scale if kind == "int4" else None,
        torch.linspace(-1, 1, 16, device=device) if kind == "table4" else None,
    )
    wide = unpack(weight).to(dtype)
    return Work(
        ours=partial(wna16_linear, x, weight, None),
        peers={"F.linear": partial(F.linear, x, wide)},
        bytes=numel_bytes(x, weight.packed, weight.scale),
        flops=2 * tokens * columns * depth if tokens > MOST_SPLIT else 0,
    )


_TINY = {"tokens": 3, "sizes": (128, 256), "dtype": torch.float16}
CASES = [
    Case(
        operation="quantized",
        name=f"{label} {name} {LLAMA_8B.label} {tokens}",
        build=build,
        shape={
            "tokens": tokens,
            "sizes": LLAMA_8B.projections[name],
            "dtype": torch.bfloat16,
            **settings,
        },
        tiny=_TINY,
        # The others take less than 10 us, or are bound by arithmetic.
        aim=_AIMS.get(label) if tokens == 1 and name == "gate_up_proj" else None,
    )
    for name in ("gate_up_proj", "down_proj")
    for label, build, settings in (
        ("fp8", _fp8, {"in_blocks": False}),
        ("fp8 blocks", _fp8, {"in_blocks": True}),
        ("int4", _wna16, {"kind": "int4", "group": 128}),
        ("nf4", _wna16, {"kind": "table4", "group": 64}),
    )
    for tokens in (8192, 64, 1)
]
_ROWS = {"to fp8": _rows, "activation to fp8": _gated, "norm to fp8": _normed}
CASES += [
    case
    for name, build in _ROWS.items()
    for case in by_tokens(
        *("quantized", name, build),
        models=(LLAMA_8B,),
        tokens=(8192, 1),
        tiny={"tokens": 3, "model": replace(SMALL, hidden=40, inner=40), "dtype": torch.float16},
    )
]
