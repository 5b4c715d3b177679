"""Grouped GEMM: tokens times the weights of the experts they have chosen.

Each program multiplies one block of rows, which have the same expert, with some columns of that
expert's weight. Rows are read and written where they lie: nothing is gathered. A tile is summed by
one program in the order of the depth, so that with blocks of one size a row's result does not
depend on the others, to the last bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_stride,
    check_like,
    check_shape,
)
from kernels.device import cdiv
from kernels.experts.activation import ExpertActivation
from kernels.experts.sorting import ExpertBlocks
from kernels.gated_activation import gate_of
from kernels.quantized.codes import Codes, expert, unpack
from kernels.quantized.wna16_sum import add_block, load_scales, scaled_sum


def expert_linear(
    x: Tensor, weight: Tensor | Codes, bias: Tensor | None, blocks: ExpertBlocks, *, top_k: int = 1
) -> Tensor:
    """Return `x` W^T + bias of the choices in `blocks`, summed in float32 and rounded once.

    Args:
        x: float [C / `top_k`, K], rows contiguous: a token is multiplied for each of its choices.
        weight: [E, N, K], contiguous, of the dtype of `x`; or codes as `kernels.quantized.codes`
            stacks them, with `x` of 16 bits.
        bias: [E, N], contiguous, of the dtype of `x`, or None.
        blocks: as `sort_by_expert` returns them, of C choices.
        top_k: adjacent choices that share a row of `x`.

    Returns:
        [C, N] in the dtype of `x`, contiguous; the rows of choices that are in no block are not
        written.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    return _multiply(x, weight, bias, blocks, top_k, None)


def expert_gated_linear(
    x: Tensor,
    weight: Tensor | Codes,
    bias: Tensor | None,
    blocks: ExpertBlocks,
    activation: ExpertActivation,
    *,
    top_k: int = 1,
) -> Tensor:
    """Return [C, N / 2], `activation` of the product that `expert_linear` returns.

    Its even columns are gates, its odd ones the ups that they multiply; with codes the columns of
    the first half, and those of the second.

    Raises:
        ValueError: as in `expert_linear`, or N is odd.
    """
    if _num_rows(weight) % 2:
        raise ValueError(f"weight: must have an even number of rows (got {_num_rows(weight)})")
    return _multiply(x, weight, bias, blocks, top_k, activation)


def reference(
    x: Tensor,
    weight: Tensor | Codes,
    bias: Tensor | None,
    blocks: ExpertBlocks,
    activation: ExpertActivation | None = None,
    *,
    top_k: int = 1,
) -> Tensor:
    """Return the product in float32, block by block, and 0 for choices that are in no block."""
    if not isinstance(weight, Codes):
        weight = weight.float()
    return _torch(
        x.float(), weight, None if bias is None else bias.float(), blocks, activation, top_k
    )


def _torch(
    x: Tensor,
    weight: Tensor | Codes,
    bias: Tensor | None,
    blocks: ExpertBlocks,
    activation: ExpertActivation | None,
    top_k: int,
) -> Tensor:
    """Multiply block by block; rows of choices that are in none are 0."""
    num_choices = len(x) * top_k
    is_wna16 = isinstance(weight, Codes)
    columns = _num_rows(weight) // (1 if activation is None else 2)
    out = torch.zeros(num_choices, columns, dtype=x.dtype, device=x.device)
    for i, choices in zip(blocks.experts.tolist(), blocks.choices, strict=True):
        if i < 0:
            break
        chosen = choices[choices < num_choices]
        its = unpack(expert(weight, i)).to(x.dtype) if isinstance(weight, Codes) else weight[i]
        result = F.linear(x[chosen // top_k], its, None if bias is None else bias[i])
        if activation is not None:
            gate, up = result.chunk(2, 1) if is_wna16 else (result[:, ::2], result[:, 1::2])
            result = activation(gate, up).to(x.dtype)
        out[chosen] = result
    return out


def _multiply(
    x: Tensor,
    weight: Tensor | Codes,
    bias: Tensor | None,
    blocks: ExpertBlocks,
    top_k: int,
    activation: ExpertActivation | None,
) -> Tensor:
    _check(x, weight, bias, blocks, top_k)
    if not device.runs_triton(x):
        return _torch(x, weight, bias, blocks, activation, top_k)
    num_blocks, rows = blocks.choices.shape
    gated = activation is not None
    columns = _num_rows(weight) // (1 + gated)
    out = torch.empty(len(x) * top_k, columns, dtype=x.dtype, device=x.device)
    formula = ExpertActivation() if activation is None else activation
    arguments = {
        "x_ptr": x,
        "bias_ptr": bias,
        "out_ptr": out,
        "choices_ptr": blocks.choices,
        "blocks_ptr": blocks.experts,
        "num_choices": len(out),
        "num_blocks": num_blocks,
        "x_stride": x.stride(0),
        "SHARED": top_k,
        "ACTIVATION": formula.kind if gated else None,
        "ALPHA": formula.alpha,
        "LIMIT": formula.limit,
        "OFFSET": formula.offset,
    }
    if not num_blocks:
        return out
    if isinstance(weight, Codes):
        tile = wna16_settings(rows, device.limits(x.device).shared_memory, gated=gated)
        wna16_grouped_gemm_kernel[(num_blocks * cdiv(columns, tile["BLOCK_N"]),)](
            **arguments, **weight.pointers(), **weight.constants(columns), **tile
        )
    else:
        tile = settings(x.dtype, rows, gated=gated)
        grouped_gemm_kernel[(num_blocks * cdiv(columns, tile["BLOCK_N"]),)](
            weight_ptr=weight, N=columns, K=weight.shape[2], **arguments, **tile
        )
    return out


def _num_rows(weight: Tensor | Codes) -> int:
    """Return the rows of each expert's weight."""
    return (weight.packed if isinstance(weight, Codes) else weight).shape[-2]


def _check(
    x: Tensor, weight: Tensor | Codes, bias: Tensor | None, blocks: ExpertBlocks, top_k: int
) -> None:
    check_shape("x", x, (None, None))
    check_last_stride("x", x)
    if isinstance(weight, Codes):
        check_dtype("x", x, torch.bfloat16, torch.float16)
        check_shape("x", x, (None, weight.depth))
        check_shape("weight", weight.packed, (None, None, None))
        check_device("weight", weight.packed, x.device)
        shape = weight.packed.shape
    else:
        check_dtype("x", x, *FLOATS)
        check_shape("weight", weight, (None, None, x.shape[1]))
        check_like("weight", weight, x)
        check_contiguous("weight", weight)
        shape = weight.shape
    if not shape.numel():
        raise ValueError(f"weight: must not be empty (got shape {list(shape)})")
    if bias is not None:
        check_shape("bias", bias, tuple(shape[:2]))
        check_like("bias", bias, x)
        check_contiguous("bias", bias)
    if top_k < 1:
        raise ValueError(f"top_k: must be positive (got {top_k})")
    check_shape("blocks", blocks.choices, (len(blocks.experts), None))
    for tensor in (blocks.choices, blocks.experts):
        check_dtype("blocks", tensor, torch.int32)
        if tensor.device != x.device:
            raise ValueError(f"blocks: must be on {x.device} (got {tensor.device})")


LARGE_BLOCK = 128  # rows of a block of 16-bit floats, where experts have many


# Not specialised on the numbers of rows and blocks: another batch must not recompile.
@triton.jit(do_not_specialize=["num_choices", "num_blocks"])
def grouped_gemm_kernel(
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
    i_in_band = tl.program_id(0) % (BAND * TILES_N)
    i_block, i_n = i_band * BAND + i_in_band % height, i_in_band // height
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


# Not specialised on the numbers of rows and blocks: another batch must not recompile.
@triton.jit(do_not_specialize=["num_choices", "num_blocks"])
def wna16_grouped_gemm_kernel(
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
    # Tiles are taken in bands, as in `grouped_gemm_kernel`. Of a gated product the first N rows of
    # an expert's weight are gates, the next N ups.
    GATED: tl.constexpr = ACTIVATION is not None
    PARTS: tl.constexpr = 2 if GATED else 1
    BLOCK_K: tl.constexpr = HALVES * RUN
    BYTES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K * RUN if HALVES == 2 else K  # of a row
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_band = tl.program_id(0) // (BAND * TILES_N)
    height = tl.minimum(num_blocks - i_band * BAND, BAND)
    i_in_band = tl.program_id(0) % (BAND * TILES_N)
    i_block, i_n = i_band * BAND + i_in_band % height, i_in_band // height
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


def wna16_settings(rows: int, shared_memory: int, *, gated: bool) -> dict[str, int]:
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
