"""GEMV: one row times a weight, alone and with the gated activation in its epilogue.

A step of one sequence multiplies one row by every weight of the model: it is bound by reading them,
and most weights of small models are read in less time than a product's launch and its prologue
take. One program computes one output over the whole depth, with no matrix instruction and no
second launch for parts of a sum. More rows are cuBLAS's, or another library's that torch calls.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import dependent_launch, device
from kernels.cpu.activation import Activation
from kernels.dependent_launch import start_next, wait
from kernels.device import cdiv, next_power_of_2
from kernels.gated_activation import gate_of, gated_activation
from kernels.gated_activation import reference as gated_reference


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x` `weight`^T + `bias`, summed in float32 and rounded once.

    Args:
        x: float [M, K].
        weight: [N, K], contiguous, of the dtype of `x`; a parameter, which no kernel writes.
        bias: [N], contiguous, of that dtype, or None.

    Returns:
        [M, N] in that dtype, contiguous.

    Raises:
        RuntimeError: shapes, dtypes or devices do not go together, as from torch.
    """
    if not _is_one_row(x, weight):
        return F.linear(x, weight, bias)
    return _launch(x, weight, bias, None)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """Return `activation(gate) * up` of what `linear` returns, the gates in its first half.

    Args:
        x, weight, bias: as of `linear`; N is even.
        activation: as of `gated_activation`.

    Returns:
        [M, N / 2] in the dtype of `x`, contiguous.

    Raises:
        RuntimeError: as `linear`.
        ValueError: as `gated_activation`.
    """
    if not _is_one_row(x, weight):
        return gated_activation(F.linear(x, weight, bias), activation)
    return _launch(x, weight, bias, activation)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None
) -> Tensor:
    """Return the row times the weight, and its gated activation, in float32."""
    result = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return result if activation is None else gated_reference(result, activation)


def _is_one_row(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel computes it; what torch would refuse, torch shall refuse."""
    return (
        x.dim() == 2
        and len(x) == 1
        and device.runs_triton(x)
        and x.shape[1] == weight.shape[1]
        and x.dtype == weight.dtype
        and x.device == weight.device
    )


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None
) -> Tensor:
    num_rows, depth = weight.shape
    columns = num_rows if activation is None else num_rows // 2
    out = torch.empty(1, columns, dtype=x.dtype, device=x.device)
    tile = settings(depth)
    _kernel[(cdiv(columns, tile["BLOCK_N"]),)](
        x_ptr=x.contiguous(),
        weight_ptr=weight,
        bias_ptr=bias,
        out_ptr=out,
        N=columns,
        K=depth,
        ACTIVATION=activation,
        **tile,
        **dependent_launch.options(x.device),
    )
    return out


@triton.jit
def _kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)[None, :]
    m_n = o_n < N
    p_w = weight_ptr + o_n.to(tl.int64)[:, None] * K + o_k  # [BLOCK_N, BLOCK_K]
    p_up = p_w + N * K
    b_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b_sum_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    m_w = m_n[:, None] & (o_k < K)
    b_w = tl.load(p_w, mask=m_w, other=0.0)
    if ACTIVATION is not None:
        b_up = tl.load(p_up, mask=m_w, other=0.0)
    wait(DEPENDENT)
    for i_k in range(0, K, BLOCK_K):
        b_x = tl.load(x_ptr + i_k + o_k, mask=i_k + o_k < K, other=0.0).to(tl.float32)
        # The next block is on the way while this one is multiplied; there is none behind the last.
        m_w = m_n[:, None] & (i_k + BLOCK_K + o_k < K)
        b_next = tl.load(p_w + i_k + BLOCK_K, mask=m_w, other=0.0)
        b_sum += b_w.to(tl.float32) * b_x
        b_w = b_next
        if ACTIVATION is not None:
            b_next = tl.load(p_up + i_k + BLOCK_K, mask=m_w, other=0.0)
            b_sum_up += b_up.to(tl.float32) * b_x
            b_up = b_next
    b_out = tl.sum(b_sum, 1)
    if bias_ptr is not None:
        b_out += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        b_up_out = tl.sum(b_sum_up, 1)
        if bias_ptr is not None:
            b_up_out += tl.load(bias_ptr + N + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_out = gate_of(b_out, ACTIVATION) * b_up_out
    tl.store(out_ptr + o_n, b_out.to(out_ptr.dtype.element_ty), mask=m_n)


def settings(depth: int) -> dict[str, int]:
    """Return tile sizes and warps for a depth: a thread has 16 bytes of the weight on the way.

    Of blocks of 256 to 4096 inputs, and of programs of 1 to 16 outputs, these were the fastest on
    an H200 for the layers of models of 0.5B to 8B, or within a twentieth of the fastest.
    """
    block = min(next_power_of_2(depth), 1024 if depth % 2048 else 2048)
    # The interpreter runs one program after the other.
    rows = 64 if device.INTERPRETED else 1
    return {"BLOCK_N": rows, "BLOCK_K": block, "num_warps": max(block // 256, 1)}
