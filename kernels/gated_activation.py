"""Gated activations of an MLP (Shazeer, 2020), SwiGLU and GEGLU, and the gate of attention.

One program computes one tile of a row, so that the wide rows of large models fill the device even
when there are few rows. Computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import cpu, dependent_launch, device
from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_dtype,
    check_last_stride,
    check_like,
    check_shape,
)
from kernels.cpu.activation import ACTIVATIONS, Activation
from kernels.dependent_launch import start_next, wait
from kernels.device import cdiv, next_power_of_2


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return `activation(gate) * up`, computed in float32.

    Args:
        gate_up: float [..., 2 I], the gate in the first half of the last dimension, which is
            contiguous.
        activation: `silu`, `gelu` with the error function (Hendrycks and Gimpel, 2016), or
            `gelu_tanh`, its approximation.

    Returns:
        [..., I] in the dtype of `gate_up`, contiguous.

    Raises:
        ValueError: the last dimension is odd or not contiguous, the dtype is not floating point,
            or there is no such activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: must be one of {', '.join(ACTIVATIONS)} (got {activation})")
    check_dtype("gate_up", gate_up, *FLOATS)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2 or not gate_up.shape[-1]:
        raise ValueError(
            f"gate_up: the last dimension must be even and positive (got {list(gate_up.shape)})"
        )
    check_last_stride("gate_up", gate_up)
    if not device.runs_triton(gate_up):
        if (fast := cpu.fast_operations(gate_up)) is not None:
            gated: Tensor = fast.gated_activation(gate_up, ACTIVATIONS[activation])
            return gated
        return reference(gate_up, activation).to(gate_up.dtype)
    size = gate_up.shape[-1] // 2
    flat = gate_up.reshape(-1, 2 * size)
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    tile = settings(size)
    if out.numel():
        _kernel[(flat.shape[0] * cdiv(size, tile["BLOCK"]),)](
            x_ptr=flat,
            out_ptr=out,
            x_stride=flat.stride(0),
            SIZE=size,
            ACTIVATION=activation,
            **tile,
            **dependent_launch.options(flat.device),
        )
    return out


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x * sigmoid(gate)`, both rounded (Qiu et al., 2025, gated attention).

    On a CPU with our kernels a value depends on its own arguments alone, to the last bit: torch
    computes the first of many values otherwise than the last.

    Args:
        x: float [T, heads, D], contiguous.
        gate: of the shape and dtype of `x`; tokens and heads may be strided.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    check_dtype("x", x, *FLOATS)
    check_shape("x", x, (None, None, None))
    check_contiguous("x", x)
    check_shape("gate", gate, tuple(x.shape))
    check_like("gate", gate, x)
    check_last_stride("gate", gate)
    if (fast := cpu.operations(x)) is not None:
        gated: Tensor = fast.sigmoid_gate(x, gate)
        return gated
    return x * torch.sigmoid(gate)


def reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return the product computed in float32 throughout."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="none" if activation == "gelu" else "tanh") * up


@triton.jit
def _kernel(
    x_ptr,
    out_ptr,
    x_stride,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait(DEPENDENT)
    TILES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    i_row = (tl.program_id(0) // TILES).to(tl.int64)
    o = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    p = x_ptr + i_row * x_stride + o
    b_gate = tl.load(p, mask=m, other=0.0).to(tl.float32)  # [BLOCK]
    b_up = tl.load(p + SIZE, mask=m, other=0.0).to(tl.float32)
    b_act = gate_of(b_gate, ACTIVATION)
    start_next(DEPENDENT)
    tl.store(out_ptr + i_row * SIZE + o, (b_act * b_up).to(out_ptr.dtype.element_ty), mask=m)


@triton.jit
def gate_of(b_gate, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr = 1.0):
    """Return the activation of the gates; `silu` is gate * sigmoid(`ALPHA` * gate)."""
    if ACTIVATION == "gelu":
        b_act = 0.5 * b_gate * (1.0 + tl.erf(b_gate * 0.7071067811865476))
    else:
        if ACTIVATION == "silu":
            b_z = ALPHA * b_gate
        else:
            # (1 + tanh(y)) / 2 is the sigmoid of 2 y, y = sqrt(2 / pi) (x + 0.044715 x^3).
            b_z = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
        b_exp = tl.exp(-tl.abs(b_z))  # at most 1, so that it cannot overflow
        b_act = b_gate * tl.where(b_z < 0, b_exp, 1.0) / (1.0 + b_exp)
    return b_act


def settings(size: int) -> dict[str, int]:
    """Return tile size and warps for rows of `size`: 8 values of gate and of up per thread.

    One vectorised load each and 32 registers per thread: full occupancy of 64 warps per SM.
    """
    block = min(next_power_of_2(size), 1024)
    return {"BLOCK": block, "num_warps": max(block // 256, 1)}
