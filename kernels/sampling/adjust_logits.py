"""Logit biases and penalties, applied to the logits before a token is sampled.

The biases of a row are a list of tokens in ascending order; one program adds a block of the list,
and duplicates of a token are summed by the first of them. Penalties look up every token of the
vocabulary in `TokenCounts`: a program handles a block of a row, and returns at once if the row has
no penalty. Nothing is fused or approximated: the results are bit-identical to torch's.
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
from kernels.sampling import logit_order
from kernels.sampling.logit_order import cleaned
from kernels.sampling.token_counts import TokenCounts

_ENTRIES = 256  # entries of a list per program
_MAX_PROGRAMS = 64  # programs per list


class LogitBias(NamedTuple):
    """Biases added to single logits of R rows.

    Attributes:
        start_loc: int32 [R + 1]; entries start_loc[r] to start_loc[r + 1] belong to row r.
        token_ids: int32 [N]; not descending within a row. Duplicates are summed in their order.
        values: float32 [N]; -inf forbids a token, regardless of other biases.
    """

    start_loc: Tensor
    token_ids: Tensor
    values: Tensor


class Penalties(NamedTuple):
    """Penalties of R rows on tokens that occurred before.

    Attributes:
        slots: int32 [R], slot of each row in `counts`; -1 for none, and so no penalty.
        repetition: float32 [R], 1 for none; divides positive and multiplies other logits of tokens
            that occur in the prompt or the output.
        presence: float32 [R], subtracted from the logits of tokens that occur in the output.
        frequency: float32 [R], subtracted once for each occurrence in the output.
    """

    slots: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def adjust_logits(
    logits: Tensor, bias: LogitBias, penalties: Penalties, counts: TokenCounts
) -> None:
    """Add the biases, then penalise repetition, then frequency and presence.

    In rows with a bias or a repetition penalty NaN becomes -inf and infinity the largest float:
    extreme values overflow, and an infinite logit leaves no distribution to sample from.

    Args:
        logits: float32 [R, V]; rows may be strided. Changed in place.
        bias, penalties: of the R rows.
        counts: tables for a vocabulary of V tokens.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(logits, bias, penalties, counts)
    if not device.runs_triton(logits):
        _torch(logits, bias, penalties, counts)
    elif logits.numel():
        _launch(logits, bias, penalties, counts)


def reference(logits: Tensor, bias: LogitBias, penalties: Penalties, counts: TokenCounts) -> Tensor:
    """Return the adjusted logits."""
    logits = logits.clone()
    _torch(logits, bias, penalties, counts)
    return logits


def _torch(logits: Tensor, bias: LogitBias, penalties: Penalties, counts: TokenCounts) -> None:
    """Adjust row by row, and only tokens that are biased or occurred before."""
    starts = bias.start_loc.tolist()
    for i_row, slot in enumerate(penalties.slots.tolist()):
        row, entries = logits[i_row], slice(starts[i_row], starts[i_row + 1])
        _torch_bias(row, bias.token_ids[entries], bias.values[entries])
        unclean = entries.start < entries.stop
        if slot >= 0:
            repetition, presence, frequency = (column[i_row] for column in penalties[1:])
            said = counts.output_counts[slot]
            if repetition != 1:
                unclean = True
                seen = _indices(_torch_bits(counts.prompt_mask[slot])[: len(said)] | said)
                value = row[seen]
                row[seen] = torch.where(value > 0, value / repetition, value * repetition)
            output = _indices(said)
            row[output] -= frequency * said[output] + presence
        if unclean:
            row.copy_(logit_order.reference(row))


def _torch_bias(row: Tensor, token_ids: Tensor, values: Tensor) -> None:
    # First occurrences first, then second ones: index_add_ has no fixed order on a GPU.
    while len(token_ids):
        first = torch.ones_like(token_ids, dtype=torch.bool)
        first[1:] = token_ids[1:] != token_ids[:-1]
        row[token_ids[first].long()] += values[first]
        token_ids, values = token_ids[~first], values[~first]


def _torch_bits(words: Tensor) -> Tensor:
    """Return the bits of int32 `words`, the lowest of each first."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, None] >> shifts) & 1).flatten()


def _indices(values: Tensor) -> Tensor:
    """Return where `values` are not 0."""
    return values.nonzero()[:, 0]


@triton.jit
def _bias_kernel(
    logits_ptr, start_loc_ptr, token_ids_ptr, values_ptr, row_stride, vocab, BLOCK: tl.constexpr
):
    i_first, i_row = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    start, end = tl.load(start_loc_ptr + i_row), tl.load(start_loc_ptr + i_row + 1)
    for i_entry in range(start + i_first, end, tl.num_programs(0) * BLOCK):
        o = i_entry + tl.arange(0, BLOCK)
        m = o < end
        b_tokens = tl.load(token_ids_ptr + o, mask=m, other=-1)
        b_previous = tl.load(token_ids_ptr + o - 1, mask=m & (o > start), other=-1)
        m &= (b_tokens >= 0) & (b_tokens < vocab) & (b_tokens != b_previous)
        p_logits = logits_ptr + i_row * row_stride + b_tokens
        b_logits = tl.load(p_logits, mask=m) + tl.load(values_ptr + o, mask=m)
        # While the next entry of any token is for the same token.
        o_next = o + 1
        m_same = m & (o_next < end)
        m_same &= tl.load(token_ids_ptr + o_next, mask=m_same, other=-1) == b_tokens
        while tl.max(m_same.to(tl.int32)) > 0:
            b_logits += tl.load(values_ptr + o_next, mask=m_same, other=0.0)
            o_next += 1
            m_same &= o_next < end
            m_same &= tl.load(token_ids_ptr + o_next, mask=m_same, other=-1) == b_tokens
        tl.store(p_logits, b_logits, mask=m)


@triton.jit
def _penalty_kernel(
    logits_ptr,
    start_loc_ptr,
    slots_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    prompt_mask_ptr,
    output_counts_ptr,
    row_stride,
    vocab,
    num_words,
    WORDS: tl.constexpr,
):
    i_block, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    biased = tl.load(start_loc_ptr + i_row) < tl.load(start_loc_ptr + i_row + 1)
    slot = tl.load(slots_ptr + i_row).to(tl.int64)
    repetition = tl.where(slot >= 0, tl.load(repetition_ptr + i_row), 1.0)
    presence = tl.where(slot >= 0, tl.load(presence_ptr + i_row), 0.0)
    frequency = tl.where(slot >= 0, tl.load(frequency_ptr + i_row), 0.0)
    penalised = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    if biased | penalised:
        o_words = i_block * WORDS + tl.arange(0, WORDS)
        o_bits = tl.arange(0, 32)
        o_tokens = o_words[:, None] * 32 + o_bits[None, :]  # [WORDS, 32]
        m = o_tokens < vocab
        p_logits = logits_ptr + i_row * row_stride + o_tokens
        b_logits = tl.load(p_logits, mask=m, other=0.0)
        b_out = b_logits
        if penalised:
            p_counts = output_counts_ptr + slot * vocab + o_tokens
            b_counts = tl.load(p_counts, mask=m, other=0)
            if repetition != 1.0:
                p_words = prompt_mask_ptr + slot * num_words + o_words
                b_words = tl.load(p_words, mask=o_words < num_words, other=0)
                b_seen = ((b_words[:, None] >> o_bits[None, :]) & 1) | b_counts
                b_less = tl.where(b_out > 0.0, tl.div_rn(b_out, repetition), b_out * repetition)
                b_out = tl.where(b_seen > 0, b_less, b_out)
            b_less = b_out - (frequency * b_counts.to(tl.float32) + presence)
            b_out = tl.where(b_counts > 0, b_less, b_out)
        if biased | (repetition != 1.0):
            b_out = cleaned(b_out)
        # Most logits are unchanged. The comparison holds for NaN too: it differs from itself.
        tl.store(p_logits, b_out, mask=m & (b_out != b_logits))


def _launch(logits: Tensor, bias: LogitBias, penalties: Penalties, counts: TokenCounts) -> None:
    num_rows, vocab = logits.shape
    row_stride = logits.stride(0)
    if bias.token_ids.shape[0]:
        programs = min(triton.cdiv(bias.token_ids.shape[0], _ENTRIES), _MAX_PROGRAMS)
        _bias_kernel[(programs, num_rows)](
            logits_ptr=logits,
            start_loc_ptr=bias.start_loc,
            token_ids_ptr=bias.token_ids,
            values_ptr=bias.values,
            row_stride=row_stride,
            vocab=vocab,
            BLOCK=_ENTRIES,
            num_warps=4,
        )
    # 16 tokens per thread.
    words, num_words = 64, counts.prompt_mask.shape[1]
    _penalty_kernel[(triton.cdiv(num_words, words), num_rows)](
        logits_ptr=logits,
        start_loc_ptr=bias.start_loc,
        slots_ptr=penalties.slots,
        repetition_ptr=penalties.repetition,
        presence_ptr=penalties.presence,
        frequency_ptr=penalties.frequency,
        prompt_mask_ptr=counts.prompt_mask,
        output_counts_ptr=counts.output_counts,
        row_stride=row_stride,
        vocab=vocab,
        num_words=num_words,
        WORDS=words,
        num_warps=4,
        # Multiply, round, then add, as torch does.
        enable_fp_fusion=False,
    )


def _check(logits: Tensor, bias: LogitBias, penalties: Penalties, counts: TokenCounts) -> None:
    check_dtype("logits", logits, torch.float32)
    check_shape("logits", logits, (None, None))
    check_last_stride("logits", logits)
    num_rows, vocab = logits.shape
    counts.check()
    check_shape("output_counts", counts.output_counts, (None, vocab))
    check_device("output_counts", counts.output_counts, logits.device)
    check_shape("token_ids", bias.token_ids, (None,))
    check_shape("values", bias.values, tuple(bias.token_ids.shape))
    check_shape("start_loc", bias.start_loc, (num_rows + 1,))
    for name, column in penalties._asdict().items():
        check_shape(name, column, (num_rows,))
    for name, column in (bias._asdict() | penalties._asdict()).items():
        floats = name not in ("start_loc", "token_ids", "slots")
        check_dtype(name, column, torch.float32 if floats else torch.int32)
        check_contiguous(name, column)
        check_device(name, column, logits.device)
