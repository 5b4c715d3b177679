"""Choice of each token's experts, and their weights.

One program takes a few tokens, all of whose logits it holds in registers, and takes the largest
in turn. Experts with equal logits are chosen by index, so that every form chooses the same.
"""

from __future__ import annotations

from typing import Literal

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
    check_shape,
)
from kernels.device import cdiv, next_power_of_2
from kernels.sampling.logit_order import to_key

_MOST_EXPERTS = 2**12  # a token's logits, and their keys of 64 bits, stay in one program
_LEAST_SUM = 1e-20  # of sigmoids, by which one may divide


Scores = Literal["softmax", "sigmoid"]


def route(
    logits: Tensor,
    top_k: int,
    *,
    normalize: bool,
    scores: Scores = "softmax",
    bias: Tensor | None = None,
    scale: float = 1.0,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the `top_k` experts of each token and their weights, those chosen first in front.

    A score is the softmax of the router's logits over all experts, or the sigmoid of one, in
    float32. The experts with the largest scores are chosen, or with the largest sums of score and
    bias (DeepSeek-AI, 2024: DeepSeek-V3). Their weights are the scores, without the bias. NaN
    counts as the largest and makes weights NaN.

    Args:
        logits: float [T, E], rows contiguous, E at most 4096.
        top_k: experts per token, from 1 to E.
        normalize: divide the weights of the chosen by their sum.
        bias: float32 [E], contiguous, for the choice alone; None: there is none.
        scale: of the weights, after that.
        slots: int64 [T], contiguous, or None; the tokens with -1 are padding.

    Returns:
        int32 and float32 [T, K], contiguous. The experts of padding are -1, its weights 0.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride, device or value.
    """
    _check(logits, top_k, bias, slots)
    if not device.runs_triton(logits):
        return reference(
            logits, top_k, normalize=normalize, scores=scores, bias=bias, scale=scale, slots=slots
        )
    num_tokens, num_experts = logits.shape
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        tile = settings(num_experts)
        _kernel[(cdiv(num_tokens, tile["BLOCK_T"]),)](
            logits_ptr=logits,
            bias_ptr=bias,
            slots_ptr=slots,
            experts_ptr=experts,
            weights_ptr=weights,
            num_tokens=num_tokens,
            stride=logits.stride(0),
            scale=float(scale),
            EXPERTS=num_experts,
            TOP=top_k,
            BLOCK_K=next_power_of_2(top_k),
            NORMALIZE=normalize,
            SIGMOID=scores == "sigmoid",
            LEAST_SUM=_LEAST_SUM,
            **tile,
        )
    return experts, weights


def reference(
    logits: Tensor,
    top_k: int,
    *,
    normalize: bool,
    scores: Scores = "softmax",
    bias: Tensor | None = None,
    scale: float = 1.0,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the same, by sorting."""
    wide = logits.float()
    # Softmax goes row by row: other operations of torch may round a row by its index among others.
    values = wide.softmax(-1) if scores == "softmax" else _sigmoid(wide)
    order = wide if bias is None else values + bias
    experts = order.sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    weights = values.gather(-1, experts)
    if normalize and scores == "softmax":
        weights = wide.gather(-1, experts).softmax(-1)
    elif normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    weights, experts = weights * scale, experts.to(torch.int32)
    if slots is not None:
        is_padding = (slots < 0)[:, None]
        experts, weights = experts.masked_fill(is_padding, -1), weights.masked_fill(is_padding, 0.0)
    return experts.contiguous(), weights.contiguous()


def _sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid as a softmax over (x, 0), which rounds each value alike."""
    return F.pad(x.unsqueeze(-1), (0, 1)).softmax(-1)[..., 0]


@triton.jit(do_not_specialize=["num_tokens"])
def _kernel(
    logits_ptr,
    bias_ptr,
    slots_ptr,
    experts_ptr,
    weights_ptr,
    num_tokens,
    stride,
    scale,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.arange(0, BLOCK_E)[None, :]
    o_k = tl.arange(0, BLOCK_K)[None, :]
    m_t, m_e = o_t < num_tokens, o_e < EXPERTS
    m_real = m_t[:, None]
    if slots_ptr is not None:
        m_real &= tl.load(slots_ptr + o_t, mask=m_t, other=-1)[:, None] >= 0
    p_logits = logits_ptr + o_t[:, None] * stride + o_e
    # Those of padding, which may be anything, are not read.
    b_logits = tl.load(p_logits, mask=m_real & m_e, other=0.0).to(tl.float32)
    b_logits = tl.where(m_e, b_logits, float("-inf"))
    b_largest = tl.max(b_logits, 1)[:, None]
    b_order = b_logits
    if bias_ptr is not None:
        if SIGMOID:
            b_order = 1.0 / (1.0 + tl.exp(-b_logits))
        else:
            b_order = tl.exp(b_logits - b_largest)
            b_order = b_order / tl.sum(b_order, 1)[:, None]
        b_order += tl.load(bias_ptr + o_e, mask=m_e, other=0.0)
    # One number is ordered as these and, where they are equal, as experts. Padding is below all.
    b_keys = tl.where(b_order != b_order, 0x7FFFFFFF, to_key(b_order)).to(tl.int64)
    b_keys = tl.where(m_e, (b_keys << 32) + (BLOCK_E - 1 - o_e), -0x7FFFFFFFFFFFFFFF)
    b_experts = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    b_chosen = tl.full([BLOCK_T, BLOCK_K], float("-inf"), tl.float32)
    for k in range(TOP):
        b_best = tl.max(b_keys, 1)[:, None]
        m_best = b_keys == b_best
        b_expert = BLOCK_E - 1 - (b_best & 0xFFFFFFFF).to(tl.int32)
        b_logit = tl.sum(tl.where(m_best, b_logits, 0.0), 1)[:, None]
        b_experts = tl.where(o_k == k, b_expert, b_experts)
        b_chosen = tl.where(o_k == k, b_logit, b_chosen)
        b_keys = tl.where(m_best, -0x7FFFFFFFFFFFFFFF, b_keys)
    if SIGMOID:
        b_weights = 1.0 / (1.0 + tl.exp(-b_chosen))
        if NORMALIZE:
            b_weights = b_weights / (tl.sum(b_weights, 1)[:, None] + LEAST_SUM)
    elif NORMALIZE:
        b_weights = tl.exp(b_chosen - tl.max(b_chosen, 1)[:, None])
        b_weights = b_weights / tl.sum(b_weights, 1)[:, None]
    else:
        b_weights = tl.exp(b_chosen - b_largest)
        b_weights = b_weights / tl.sum(tl.exp(b_logits - b_largest), 1)[:, None]
    b_weights *= scale
    b_experts = tl.where(m_real, b_experts, -1)
    b_weights = tl.where(m_real, b_weights, 0.0)
    o_out = o_t[:, None] * TOP + o_k
    m_out = m_t[:, None] & (o_k < TOP)
    tl.store(experts_ptr + o_out, b_experts, mask=m_out)
    tl.store(weights_ptr + o_out, b_weights, mask=m_out)


def settings(num_experts: int) -> dict[str, int]:
    """Return tile sizes and warps: 8 logits per thread, with 24 registers of logits and keys."""
    block_e = next_power_of_2(num_experts)
    block_t = max(1024 // block_e, 1)
    return {"BLOCK_T": block_t, "BLOCK_E": block_e, "num_warps": max(block_t * block_e // 256, 1)}


def _check(logits: Tensor, top_k: int, bias: Tensor | None, slots: Tensor | None) -> None:
    check_dtype("logits", logits, *FLOATS)
    check_shape("logits", logits, (None, None))
    check_last_stride("logits", logits)
    num_experts = logits.shape[1]
    if not 1 <= num_experts <= _MOST_EXPERTS:
        raise ValueError(f"logits: must be of 1 to {_MOST_EXPERTS} experts (got {num_experts})")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k: must be from 1 to {num_experts} (got {top_k})")
    if bias is not None:
        check_shape("bias", bias, (num_experts,))
        check_dtype("bias", bias, torch.float32)
        check_device("bias", bias, logits.device)
        check_contiguous("bias", bias)
    if slots is not None:
        check_shape("slots", slots, (len(logits),))
        check_dtype("slots", slots, torch.int64)
        check_device("slots", slots, logits.device)
        check_contiguous("slots", slots)
