"""Log-probabilities and ranks of chosen tokens, and the most likely tokens, without a sort.

One pass with many programs stores the maximum of each group of adjacent tokens, and each chunk's
contribution to the softmax and to the rank. Then one program per row takes the first n groups,
which hold the first n tokens (see `group_size`), and selects these tokens one by one. A row is read
once, and its maxima once; the rest is done in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.checks import (
    check_contiguous,
    check_device,
    check_dtype,
    check_last_stride,
    check_shape,
)
from kernels.device import cdiv, next_power_of_2
from kernels.sampling import logit_order
from kernels.sampling.logit_order import cleaned, first_of, from_key, group_size, to_key

_MOST = 32  # tokens selected one by one; beyond this a sort is used
_TAKEN = tl.constexpr(-(2**31))  # below the key of any logit: already selected


class Logprobs(NamedTuple):
    """Log-probabilities of a token of each of R rows, and of the N most likely ones.

    Attributes:
        chosen: float32 [R], of the token.
        ranks: int32 [R], 1 plus the number of more likely tokens.
        top_token_ids: int64 [R, N], by descending logit and ascending index.
        top_logprobs: float32 [R, N].
    """

    chosen: Tensor
    ranks: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Return the log-probability and rank of a token of each row, and the most likely tokens.

    NaN counts as -inf and infinity as the largest float; not on a CPU, where the order of equally
    likely tokens is undefined too. All log-probabilities of a row of -inf are NaN. More than 32
    most likely tokens require a full sort.

    Args:
        logits: float32 [R, V], unprocessed; rows may be strided.
        token_ids: int64 [R], in the vocabulary.
        num_top: how many most likely tokens to find, 0 to V.

    Raises:
        ValueError: an argument has a wrong value, shape, dtype, stride or device.
    """
    _check(logits, token_ids, num_top)
    if not device.runs_triton(logits):
        return _torch(logits, token_ids, num_top)
    if num_top > _MOST:
        chosen, ranks, _, _ = _launch(logits, token_ids, 0)
        return Logprobs(chosen, ranks, *_sorted(logits, num_top))
    return _launch(logits, token_ids, num_top)


def reference(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Return the same with torch operations, in float64."""
    values = logit_order.reference(logits)
    own = values.gather(-1, token_ids[:, None])
    logprobs = values.double().log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
    ranks = (values > own).sum(-1).int() + 1
    return Logprobs(logprobs.float(), ranks, *_sorted(logits, num_top))


def _torch(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1).int() + 1
    values, indices = logprobs.topk(num_top, dim=-1)
    return Logprobs(chosen[:, 0], ranks, indices, values)


def _sorted(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    values = logit_order.reference(logits)
    order = values.argsort(dim=-1, descending=True, stable=True)[:, :num_top]
    return order, values.double().log_softmax(-1).gather(-1, order).float()


@triton.jit
def _scan_kernel(
    logits_ptr,
    token_ids_ptr,
    peaks_ptr,
    sums_ptr,
    larger_ptr,
    maxima_ptr,
    row_stride,
    vocab,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Reduce one chunk of a row: maximum, sum of exponentials, and number of larger logits."""
    i_chunk, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_out = i_row * tl.num_programs(0) + i_chunk
    o_groups = i_chunk * GROUPS + tl.arange(0, GROUPS)
    o_tokens = o_groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    p_logits = logits_ptr + i_row * row_stride
    b_logits = cleaned(tl.load(p_logits + o_tokens, mask=o_tokens < vocab, other=float("-inf")))
    own = cleaned(tl.load(p_logits + tl.load(token_ids_ptr + i_row)))
    peak = tl.max(b_logits)
    tl.store(peaks_ptr + i_out, peak)
    tl.store(sums_ptr + i_out, tl.sum(tl.exp(b_logits - _finite(peak))))
    tl.store(larger_ptr + i_out, tl.sum((b_logits > own).to(tl.int32)))
    p_maxima = maxima_ptr + i_row * num_groups + o_groups
    tl.store(p_maxima, tl.max(b_logits, axis=1), mask=o_groups < num_groups)


@triton.jit
def _finite(peak):
    return tl.where(peak == float("-inf"), 0.0, peak)


# Not specialised on what requests ask for: another number must not recompile.
@triton.jit(do_not_specialize=["num_top"])
def _report_kernel(
    logits_ptr,
    token_ids_ptr,
    peaks_ptr,
    sums_ptr,
    larger_ptr,
    maxima_ptr,
    logprobs_ptr,
    ranks_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    row_stride,
    vocab,
    num_groups,
    num_chunks,
    num_top,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOP: tl.constexpr,
):
    """Combine the chunks of one row, and select its most likely tokens one by one."""
    i_row = tl.program_id(0).to(tl.int64)
    p_logits = logits_ptr + i_row * row_stride
    o_chunks = tl.arange(0, CHUNKS)
    m_chunks = o_chunks < num_chunks
    o_chunks += i_row * num_chunks
    b_peaks = tl.load(peaks_ptr + o_chunks, mask=m_chunks, other=float("-inf"))
    b_sums = tl.load(sums_ptr + o_chunks, mask=m_chunks, other=0.0)
    peak = tl.max(b_peaks)
    # Kept apart from the peak: added to a large peak it would lose precision.
    log_sum = tl.log(tl.sum(b_sums * tl.exp(b_peaks - _finite(peak))))
    own = cleaned(tl.load(p_logits + tl.load(token_ids_ptr + i_row)))
    larger = tl.sum(tl.load(larger_ptr + o_chunks, mask=m_chunks, other=0))
    tl.store(logprobs_ptr + i_row, own - peak - log_sum)
    tl.store(ranks_ptr + i_row, larger + 1)

    if TOP > 0:
        o_groups, o_top = tl.arange(0, BLOCK), tl.arange(0, TOP)
        p_maxima = maxima_ptr + i_row * num_groups + o_groups
        b_maxima = tl.load(p_maxima, mask=o_groups < num_groups, other=float("-inf"))
        b_keys = tl.where(o_groups < num_groups, to_key(b_maxima), _TAKEN)
        b_groups, _ = _take(b_keys, o_groups, o_top, num_top)

        o_tokens = b_groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [TOP, GROUP]
        m = (o_top < num_top)[:, None] & (o_tokens < vocab)
        b_logits = cleaned(tl.load(p_logits + o_tokens, mask=m, other=float("-inf")))
        b_keys = tl.where(m, to_key(b_logits), _TAKEN)
        b_tokens, b_taken = _take(b_keys, o_tokens, o_top, num_top)
        p_out = i_row * num_top + o_top
        tl.store(top_ids_ptr + p_out, b_tokens.to(tl.int64), mask=o_top < num_top)
        b_logprobs = from_key(b_taken) - peak - log_sum
        tl.store(top_logprobs_ptr + p_out, b_logprobs, mask=o_top < num_top)


@triton.jit
def _take(b_keys, o_items, o_top, count):
    """Return the `count` items with the largest keys, ties by lowest item, and their keys."""
    b_items, b_taken = o_top * 0, o_top * 0
    for i in range(count):
        best = tl.max(b_keys)
        item = first_of(o_items, b_keys, best)
        b_items = tl.where(o_top == i, item, b_items)
        b_taken = tl.where(o_top == i, best, b_taken)
        b_keys = tl.where(o_items == item, _TAKEN, b_keys)
    return b_items, b_taken


def settings(vocab: int) -> tuple[int, int]:
    """Return tokens per group and tokens per chunk, for rows of `vocab` logits.

    A chunk is 16 values per thread of 4 warps, and 63 programs for one row of 128k.
    """
    group = group_size(vocab)
    return group, max(2048, 16 * group)


def _launch(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    num_rows, vocab = logits.shape
    group, chunk = settings(vocab)
    # A multiple of 16 maxima per row allows vectorised loads. Those past the vocabulary are -inf.
    num_groups, num_chunks = 16 * cdiv(vocab, 16 * group), cdiv(vocab, chunk)

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    logprobs, ranks = new(torch.float32), new(torch.int32)
    top_ids, top_logprobs = new(torch.int64, num_top), new(torch.float32, num_top)
    if not num_rows:
        return Logprobs(logprobs, ranks, top_ids, top_logprobs)
    shared = {
        "logits_ptr": logits,
        "token_ids_ptr": token_ids,
        "peaks_ptr": new(torch.float32, num_chunks),
        "sums_ptr": new(torch.float32, num_chunks),
        "larger_ptr": new(torch.int32, num_chunks),
        "maxima_ptr": new(torch.float32, num_groups),
        "row_stride": logits.stride(0),
        "vocab": vocab,
        "num_groups": num_groups,
        "GROUP": group,
    }
    _scan_kernel[(num_chunks, num_rows)](**shared, GROUPS=chunk // group, num_warps=4)
    _report_kernel[(num_rows,)](
        **shared,
        logprobs_ptr=logprobs,
        ranks_ptr=ranks,
        top_ids_ptr=top_ids,
        top_logprobs_ptr=top_logprobs,
        num_chunks=num_chunks,
        num_top=num_top,
        BLOCK=next_power_of_2(num_groups),
        CHUNKS=next_power_of_2(num_chunks),
        TOP=_MOST if num_top else 0,
        # At most 16 maxima per thread.
        num_warps=16 if num_top else 4,
    )
    return Logprobs(logprobs, ranks, top_ids, top_logprobs)


def _check(logits: Tensor, token_ids: Tensor, num_top: int) -> None:
    check_dtype("logits", logits, torch.float32)
    check_shape("logits", logits, (None, None))
    check_last_stride("logits", logits)
    num_rows, vocab = logits.shape
    if not vocab:
        raise ValueError("logits: rows must not be empty")
    if not 0 <= num_top <= vocab:
        raise ValueError(f"num_top: must be 0 to {vocab}, the vocabulary (got {num_top})")
    check_dtype("token_ids", token_ids, torch.int64)
    check_shape("token_ids", token_ids, (num_rows,))
    check_contiguous("token_ids", token_ids)
    check_device("token_ids", token_ids, logits.device)
