"""The kernel of products with the weights of each row's expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gated_activation import gate_of

LARGE_BLOCK = 128  # rows of a block of 16-bit floats, where experts have many


# Not specialised on the numbers of rows and blocks: another batch must not recompile.
@triton.jit(do_not_specialize=["num_choices", "num_blocks"])
def product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    choices_ptr,
    blocks_ptr,
    num_choices,
    num_blocks,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    # Tiles are taken in bands of BAND blocks, column by column: an expert's weight is read once per
    # band, whose rows stay in the L2 cache.
    GATED: tl.constexpr = ACTIVATION is not None
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    ROWS: tl.constexpr = 2 if GATED else 1  # of the weight, per column of the result
    i_band = tl.program_id(0) // (BAND * TILES_N)
    height = tl.minimum(num_blocks - i_band * BAND, BAND)
    i_place = tl.program_id(0) % (BAND * TILES_N)
    i_block, i_n = i_band * BAND + i_place % height, i_place // height
    expert = tl.load(blocks_ptr + i_block).to(tl.int64)
    if expert >= 0:
        o_choice = tl.load(choices_ptr + i_block * BLOCK_M + tl.arange(0, BLOCK_M))
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = tl.arange(0, BLOCK_K)
        m_m, m_n = o_choice < num_choices, o_n < N
        o_row = expert * (ROWS * N) + ROWS * o_n
        p_x = x_ptr + (o_choice // SHARED).to(tl.int64)[:, None] * x_stride + o_k[None, :]
        p_w = weight_ptr + o_row[:, None] * K + o_k[None, :]
        b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_up = b_sum
        if bias_ptr is not None:  # first: afterwards registers are scarcer
            b_sum += tl.load(bias_ptr + o_row, mask=m_n, other=0.0).to(tl.float32)[None, :]
            if GATED:
                b_up += tl.load(bias_ptr + o_row + 1, mask=m_n, other=0.0).to(tl.float32)[None, :]
        for i_k in range(0, K, BLOCK_K):
            m_x, m_w = m_m[:, None], m_n[:, None]
            if K % BLOCK_K:
                m_x, m_w = m_x & (i_k + o_k < K)[None, :], m_w & (i_k + o_k < K)[None, :]
            b_x = tl.load(p_x + i_k, mask=m_x, other=0.0)  # [BLOCK_M, BLOCK_K]
            b_w = tl.load(p_w + i_k, mask=m_w, other=0.0)  # [BLOCK_N, BLOCK_K]
            b_sum = tl.dot(b_x, tl.trans(b_w), b_sum, input_precision="ieee")
            if GATED:
                b_w = tl.load(p_w + K + i_k, mask=m_w, other=0.0)
                b_up = tl.dot(b_x, tl.trans(b_w), b_up, input_precision="ieee")
        if GATED:
            b_sum = activated(b_sum, b_up, ACTIVATION, ALPHA, LIMIT, OFFSET)
        p_out = out_ptr + o_choice.to(tl.int64)[:, None] * N + o_n[None, :]
        tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def activated(
    b_gate,
    b_up,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Return what `ExpertActivation` does; NaN stays."""
    b_gate = tl.where(b_gate > LIMIT, LIMIT, b_gate)
    b_up = tl.where(b_up > LIMIT, LIMIT, tl.where(b_up < -LIMIT, -LIMIT, b_up)) + OFFSET
    return gate_of(b_gate, ACTIVATION, ALPHA) * b_up


def block_rows(
    dtype: torch.dtype, num_choices: int, num_experts: int, *, invariant: bool = False
) -> int:
    """Return the rows per block of experts that are chosen `num_choices` times together.

    Few choices are bound by reading the weights: the 16 rows of the smallest matrix instruction.
    Where an expert has 48 and more, larger tiles read its weight fewer times; with fewer, most of
    their rows would be empty.

    Args:
        invariant: return the same for any number of choices: the instruction, and with it the order
            of a sum, depends on the rows.
    """
    if not invariant and num_choices < 48 * num_experts:
        return 16
    return 32 if dtype == torch.float32 else LARGE_BLOCK


def settings(dtype: torch.dtype, rows: int, *, gated: bool) -> dict[str, int]:
    """Return tile sizes, warps and stages for blocks of `rows`.

    A gated tile multiplies with twice its columns of weights. Small tiles have 16 KiB of weights
    per stage on the way: of one token and 8 experts of 2 x 768 rows, 192 programs read. Large ones
    are two warpgroups' of 128 x 128 sums. No matrix instruction has full float32 precision; there
    larger tiles spill.
    """
    columns = 2 if gated else 1
    if dtype == torch.float32:
        tile = {"BLOCK_N": 32 // columns, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
    elif rows == 16:
        tile = {"BLOCK_N": 64 // columns, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    else:
        tile = {"BLOCK_N": 128 // columns, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_M": rows, "BAND": 8, **tile}
