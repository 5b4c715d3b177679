"""The kernel of products with codes of 4 or 8 bits of each row's expert, widened in registers.

As in `kernels.quantized.coded_product` the weight is the left operand, and what is computed is the
transposed result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.experts.product_kernel import activated
from kernels.quantized.coded_sum import add_block, load_scales, scaled_sum


# Not specialised on the numbers of rows and blocks: another batch must not recompile.
@triton.jit(do_not_specialize=["num_choices", "num_blocks"])
def coded_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    shift_ptr,
    table_ptr,
    factor_ptr,
    bias_ptr,
    out_ptr,
    choices_ptr,
    blocks_ptr,
    num_choices,
    num_blocks,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    HALVES: tl.constexpr,
    RUN: tl.constexpr,
    SHARED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BAND: tl.constexpr,
):
    # Tiles are taken in bands, as in `product_kernel`. Of a gated product the first N rows of an
    # expert's weight are gates, the next N ups.
    GATED: tl.constexpr = ACTIVATION is not None
    PARTS: tl.constexpr = 2 if GATED else 1
    BLOCK_K: tl.constexpr = HALVES * RUN
    BYTES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K * RUN if HALVES == 2 else K  # of a row
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_band = tl.program_id(0) // (BAND * TILES_N)
    height = tl.minimum(num_blocks - i_band * BAND, BAND)
    i_place = tl.program_id(0) % (BAND * TILES_N)
    i_block, i_n = i_band * BAND + i_place % height, i_place // height
    expert = tl.load(blocks_ptr + i_block).to(tl.int64)
    if expert >= 0:
        o_choice = tl.load(choices_ptr + i_block * BLOCK_M + tl.arange(0, BLOCK_M))
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = tl.arange(0, RUN)
        m_m, m_n = o_choice < num_choices, o_n < N
        o_row = expert * (PARTS * N) + o_n
        p_x = x_ptr + (o_choice // SHARED).to(tl.int64)[:, None] * x_stride + o_k[None, :]
        p_w = packed_ptr + o_row[:, None] * BYTES + o_k[None, :]
        o_scale = o_row // ROWS * (K // GROUP)
        o_up = (o_row + N) // ROWS * (K // GROUP)
        b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        b_up = b_sum
        for i_k in range(0, K, BLOCK_K):
            i_byte = i_k // HALVES
            m_w = m_n[:, None]
            if BYTES % RUN:
                m_w = m_w & (i_byte + o_k < BYTES)[None, :]
            scales = load_scales(
                i_k, m_n, scale_ptr, shift_ptr, o_scale, K, GROUP, SCALES, HALVES, RUN
            )
            b_code = tl.load(p_w + i_byte, mask=m_w, other=0)  # [BLOCK_N, RUN]
            b_sum = add_block(
                b_sum,
                b_code,
                p_x,
                m_m,
                i_k,
                scales,
                shift_ptr,
                table_ptr,
                K,
                GROUP,
                KIND,
                HALVES,
                RUN,
                NATIVE,
            )
            if GATED:  # after the sum of the gates, which leaves more registers
                scales = load_scales(
                    i_k, m_n, scale_ptr, shift_ptr, o_up, K, GROUP, SCALES, HALVES, RUN
                )
                b_code = tl.load(p_w + N * BYTES + i_byte, mask=m_w, other=0)
                b_up = add_block(
                    b_up,
                    b_code,
                    p_x,
                    m_m,
                    i_k,
                    scales,
                    shift_ptr,
                    table_ptr,
                    K,
                    GROUP,
                    KIND,
                    HALVES,
                    RUN,
                    NATIVE,
                )
        b_sum = scaled_sum(b_sum, scale_ptr, factor_ptr, o_scale, o_row, m_n, SCALES, GROUP == K)
        if bias_ptr is not None:
            b_sum += tl.load(bias_ptr + o_row, mask=m_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            b_up = scaled_sum(b_up, scale_ptr, factor_ptr, o_up, o_row + N, m_n, SCALES, GROUP == K)
            if bias_ptr is not None:
                b_up += tl.load(bias_ptr + N + o_row, mask=m_n, other=0.0).to(tl.float32)[:, None]
            b_sum = activated(b_sum, b_up, ACTIVATION, ALPHA, LIMIT, OFFSET)
        p_out = out_ptr + o_choice.to(tl.int64)[None, :] * N + o_n[:, None]
        tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=m_n[:, None] & m_m[None, :])


def settings(rows: int, shared_memory: int, *, gated: bool) -> dict[str, int]:
    """Return tile sizes, warps and stages for blocks of `rows`.

    Few rows are bound by reading the weight: tiles of 64 of its rows, the fewest that a matrix
    instruction of Hopper takes, or of as many gates and as many ups. Of 128 rows a tile is two
    warpgroups' of 128 x 128 sums, gates and ups together.

    Args:
        shared_memory: bytes that a program may have.
    """
    if rows == 16:
        tile = {"BLOCK_N": 64, "num_warps": 4, "num_stages": 4}
    else:
        stages = 3 if shared_memory > 2**17 else 2
        tile = {"BLOCK_N": 64 if gated else 128, "num_warps": 8, "num_stages": stages}
    return {"BLOCK_M": rows, "BAND": 8, **tile}
