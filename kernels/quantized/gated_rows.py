"""The gated activation of an MLP, quantised to FP8 for the product that follows.

One program computes one row, which it reads once and holds in registers: the activation is neither
written nor read again in 16 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import dependent_launch, device, gated_activation
from kernels.checks import check_dtype, check_last_stride, check_shape
from kernels.cpu.activation import ACTIVATIONS, Activation
from kernels.dependent_launch import start_next, wait
from kernels.device import next_power_of_2
from kernels.e4m3 import FP8
from kernels.gated_activation import gate_of
from kernels.quantized import rows
from kernels.quantized.rows import check_scale, quantize_tile


def gated_rows(
    gate_up: Tensor, activation: Activation, *, group: int | None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what `quantize_rows` does of `gated_activation(gate_up, activation)`.

    Args:
        gate_up: bfloat16 or float16 [M, 2 I], the gate in the first half, rows contiguous.
        activation: as in `gated_activation`.
        group: values that share a scale, a power of two that divides I; None: all of a row.
        scale: float32 [1], positive: of all; None: each group has that of its largest value.

    Returns:
        float8_e4m3fn [M, I], contiguous, and float32 [M, I / group] or [M, 1].

    Raises:
        ValueError: an argument has a wrong shape, dtype or stride, or there is no such activation.
    """
    _check(gate_up, activation, group, scale)
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    if not device.runs_triton(gate_up):
        gated = gated_activation.gated_activation(gate_up, activation)
        codes, scales = rows.reference(gated.view(-1, group or size), scale)
        return codes.view(num_rows, size), scales.view(num_rows, size // (group or size))
    out = torch.empty(num_rows, size, dtype=FP8, device=gate_up.device)
    scales = torch.empty(
        num_rows, size // (group or size), dtype=torch.float32, device=gate_up.device
    )
    tile = settings(size)
    if num_rows:
        _kernel[(num_rows,)](
            x_ptr=gate_up,
            scale_ptr=scale,
            out_ptr=out.view(torch.uint8),
            scales_ptr=scales,
            x_stride=gate_up.stride(0),
            SIZE=size,
            GROUP=group or tile["BLOCK"],
            SCALES=scales.shape[1],
            ACTIVATION=activation,
            NATIVE=device.converts_fp8(gate_up.device),
            **tile,
            **dependent_launch.options(gate_up.device),
        )
    return out, scales


@triton.jit
def _kernel(
    x_ptr,
    scale_ptr,
    out_ptr,
    scales_ptr,
    x_stride,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    o_group = tl.arange(0, BLOCK // GROUP)
    o = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [groups, GROUP]
    m = o < SIZE
    p = x_ptr + i_row * x_stride + o
    b_gate = tl.load(p, mask=m, other=0.0)
    b_up = tl.load(p + SIZE, mask=m, other=0.0).to(tl.float32)
    b_x = gate_of(b_gate.to(tl.float32), ACTIVATION) * b_up
    b_x = b_x.to(b_gate.dtype).to(tl.float32)  # rounded as the activation alone is
    b_code, b_scale = quantize_tile(b_x, scale_ptr, NATIVE)
    start_next(DEPENDENT)
    tl.store(out_ptr + i_row * SIZE + o, b_code, mask=m)
    tl.store(scales_ptr + i_row * SCALES + o_group, b_scale, mask=o_group < SCALES)


def settings(size: int) -> dict[str, int]:
    """Return tile size and warps for rows of `size`: 16 values of gate and of up per thread."""
    block = max(next_power_of_2(size), 128)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 32)}


def _check(gate_up: Tensor, activation: str, group: int | None, scale: Tensor | None) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: must be one of {', '.join(ACTIVATIONS)} (got {activation})")
    check_dtype("gate_up", gate_up, torch.bfloat16, torch.float16)
    check_shape("gate_up", gate_up, (None, None))
    check_last_stride("gate_up", gate_up)
    size = gate_up.shape[1] // 2
    if gate_up.shape[1] % 2 or not size:
        raise ValueError(
            f"gate_up: rows must be even and positive (got shape {list(gate_up.shape)})"
        )
    if group is not None and (group & group - 1 or group > 128 or size % group):
        raise ValueError(f"group: must be a power of 2 up to 128 that divides {size} (got {group})")
    check_scale(scale, gate_up.device)
