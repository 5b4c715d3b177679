"""Products of tokens with the weights of the experts they have chosen.

Each program multiplies one block of rows, which have the same expert, with some columns of that
expert's weight. Rows are read and written where they lie: nothing is gathered. A tile is summed by
one program in the order of the depth, so that with blocks of one size a row's result does not
depend on the others, to the last bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
from kernels.experts.coded_kernel import coded_kernel
from kernels.experts.coded_kernel import settings as coded_settings
from kernels.experts.product_kernel import product_kernel, settings
from kernels.experts.sorting import ExpertBlocks
from kernels.quantized.codes import Codes, expert, unpack


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
    coded = isinstance(weight, Codes)
    columns = _num_rows(weight) // (1 if activation is None else 2)
    out = torch.zeros(num_choices, columns, dtype=x.dtype, device=x.device)
    for i, choices in zip(blocks.experts.tolist(), blocks.choices, strict=True):
        if i < 0:
            break
        chosen = choices[choices < num_choices]
        its = unpack(expert(weight, i)).to(x.dtype) if isinstance(weight, Codes) else weight[i]
        product = F.linear(x[chosen // top_k], its, None if bias is None else bias[i])
        if activation is not None:
            gate, up = product.chunk(2, 1) if coded else (product[:, ::2], product[:, 1::2])
            product = activation(gate, up).to(x.dtype)
        out[chosen] = product
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
        tile = coded_settings(rows, device.limits(x.device).shared_memory, gated=gated)
        coded_kernel[(num_blocks * cdiv(columns, tile["BLOCK_N"]),)](
            **arguments, **weight.pointers(), **weight.constants(columns), **tile
        )
    else:
        tile = settings(x.dtype, rows, gated=gated)
        product_kernel[(num_blocks * cdiv(columns, tile["BLOCK_N"]),)](
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
