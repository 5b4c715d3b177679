"""Mixture of experts (Shazeer et al., 2017): the gated MLPs that each token has chosen, weighted.

Grouped products: rows are sorted by expert into blocks, and one program computes one tile of a
block's result with the weights of its expert. The grid depends on the number of tokens alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.checks import FLOATS, check_contiguous, check_dtype, check_like, check_shape
from kernels.cpu.activation import Activation
from kernels.expert_assignment import Assignment, assign_to_experts
from kernels.gated_activation import reference as activated


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    activation: Activation,
) -> Tensor:
    """Return the sum of each token's chosen experts, weighted; summed in float32, rounded once.

    Args:
        x: float [T, H], contiguous.
        gate_up: [E, 2 I, H], contiguous, of the dtype of `x`: the gates of each expert first.
        down: [E, H, I], likewise.
        expert_ids: int64 [T, top_k], each token's experts, which differ.
        weights: float32 [T, top_k].
        activation: of the gates.

    Returns:
        [T, H] in the dtype of `x`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(x, gate_up, down, expert_ids, weights)
    if not device.runs_triton(x):
        return _torch(x, gate_up, down, expert_ids, weights, activation)
    tokens, hidden = x.shape
    num_experts, top_k, size = len(gate_up), expert_ids.shape[1], down.shape[2]
    if not tokens:
        return torch.empty_like(x)
    tiles = settings(x.dtype, tokens * top_k, num_experts)
    assignment = assign_to_experts(expert_ids, num_experts, tiles["BLOCK_M"])
    inner = torch.empty(len(assignment.rows), size, dtype=x.dtype, device=x.device)
    _launch(x, gate_up, None, inner, assignment, top_k, num_experts, activation, tiles)
    out = torch.empty(tokens * top_k, hidden, dtype=torch.float32, device=x.device)
    _launch(inner, down, weights, out, assignment, top_k, num_experts, None, tiles)
    return out.view(tokens, top_k, hidden).sum(1).to(x.dtype)


def reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    activation: Activation,
) -> Tensor:
    """Return the result in float32, computed token by token."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, chosen in enumerate(expert_ids.tolist()):
        for choice, expert in enumerate(chosen):
            inner = activated(gate_up[expert].float() @ x[token].float(), activation)
            out[token] += weights[token, choice] * (down[expert].float() @ inner)
    return out


def _torch(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    activation: Activation,
) -> Tensor:
    """Compute one expert after another, for all its tokens at once."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in expert_ids.unique().tolist():
        tokens, choices = (expert_ids == expert).nonzero(as_tuple=True)
        inner = activated(F.linear(x[tokens], gate_up[expert]), activation).to(x.dtype)
        product = F.linear(inner, down[expert]).float()
        out.index_add_(0, tokens, product * weights[tokens, choices, None])
    return out.to(x.dtype)


# Not specialised on the number of rows: another batch must not recompile.
@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    row_ptr,
    expert_ptr,
    num_rows,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Without an activation, the second product: rows of x are places, and rows of out are rows.

    With one, the first: rows of x are tokens, rows of out places, and the weight has 2 N rows.
    """
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_block, i_n = tl.program_id(0) // TILES_N, tl.program_id(0) % TILES_N
    i_expert = tl.load(expert_ptr + i_block)
    if i_expert < E:
        o_place = i_block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        b_row = tl.load(row_ptr + o_place)  # [BLOCK_M]
        m_m = b_row < num_rows
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = tl.arange(0, BLOCK_K)
        m_n = o_n < N
        GATED: tl.constexpr = ACTIVATION is not None
        o_x = (b_row // TOP_K).to(tl.int64) if GATED else o_place
        p_x = x_ptr + o_x[:, None] * K + o_k[None, :]
        WEIGHT_ROWS: tl.constexpr = 2 * N if GATED else N
        p_w = weight_ptr + (i_expert.to(tl.int64) * WEIGHT_ROWS + o_n)[:, None] * K + o_k[None, :]
        b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_k in range(0, K, BLOCK_K):
            m_x, m_w = m_m[:, None], m_n[:, None]
            if K % BLOCK_K:
                m_x, m_w = m_x & (i_k + o_k < K)[None, :], m_w & (i_k + o_k < K)[None, :]
            b_x = tl.load(p_x + i_k, mask=m_x, other=0.0)  # [BLOCK_M, BLOCK_K]
            b_w = tl.load(p_w + i_k, mask=m_w, other=0.0)  # [BLOCK_N, BLOCK_K]
            b_sum = tl.dot(b_x, tl.trans(b_w), b_sum, input_precision="ieee")
            if GATED:
                b_w = tl.load(p_w + N * K + i_k, mask=m_w, other=0.0)
                b_up = tl.dot(b_x, tl.trans(b_w), b_up, input_precision="ieee")
        if GATED:
            if ACTIVATION == "gelu":
                b_act = 0.5 * b_sum * (1.0 + tl.erf(b_sum * 0.7071067811865476))
            else:
                if ACTIVATION == "silu":
                    b_z = b_sum
                else:
                    b_z = 1.5957691216057308 * (b_sum + 0.044715 * b_sum * b_sum * b_sum)
                b_exp = tl.exp(-tl.abs(b_z))  # at most 1, so that it cannot overflow
                b_act = b_sum * tl.where(b_z < 0, b_exp, 1.0) / (1.0 + b_exp)
            b_sum = b_act * b_up
            o_out = o_place
        else:
            b_sum *= tl.load(scale_ptr + b_row, mask=m_m, other=0.0)[:, None]
            o_out = b_row.to(tl.int64)
        p_out = out_ptr + o_out[:, None] * N + o_n[None, :]
        tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


def settings(dtype: torch.dtype, num_rows: int, num_experts: int) -> dict[str, int]:
    """Return tile sizes, warps and stages.

    Few rows per expert, as in decode, are bound by reading the weights: blocks of 16 rows, the
    least that matrix units take. Two accumulators of 64 x 64 leave two programs of 4 warps an SM.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    block = 16 if num_rows <= 16 * num_experts else 64
    return {"BLOCK_M": block, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}


def _launch(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    out: Tensor,
    assignment: Assignment,
    top_k: int,
    num_experts: int,
    activation: Activation | None,
    tiles: dict[str, int],
) -> None:
    num_columns = out.shape[1]
    grid = len(assignment.block_experts) * triton.cdiv(num_columns, tiles["BLOCK_N"])
    _kernel[(grid,)](
        x_ptr=x,
        weight_ptr=weight,
        scale_ptr=scale,
        out_ptr=out,
        row_ptr=assignment.rows,
        expert_ptr=assignment.block_experts,
        num_rows=len(x) * top_k if activation is not None else len(out),
        E=num_experts,
        N=num_columns,
        K=weight.shape[2],
        TOP_K=top_k,
        ACTIVATION=activation,
        **tiles,
    )


def _check(x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
    check_dtype("x", x, *FLOATS)
    check_shape("x", x, (None, None))
    check_shape("down", down, (None, x.shape[1], None))
    check_shape("gate_up", gate_up, (len(down), 2 * down.shape[2], x.shape[1]))
    check_dtype("expert_ids", expert_ids, torch.int64)
    check_shape("expert_ids", expert_ids, (len(x), None))
    check_dtype("weights", weights, torch.float32)
    check_shape("weights", weights, tuple(expert_ids.shape))
    for name, tensor in (("gate_up", gate_up), ("down", down)):
        check_like(name, tensor, x)
        check_contiguous(name, tensor)
    for name, tensor in (("x", x), ("weights", weights)):
        check_contiguous(name, tensor)
