"""Biases, penalties and masks, applied to the logits before a token is sampled.

What a sequence asks for is in the slot tables; what the host decides step by step, because it
depends on the text or on a grammar, comes as masks of single rows. A program handles a block of a
row, in one launch for all of it, and returns at once if the row wants none of it. Nothing is fused
or approximated: the results are bit-identical to torch's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
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
from kernels.device import cdiv
from kernels.sampling import logit_order
from kernels.sampling.logit_order import cleaned
from kernels.sampling.token_counts import TokenCounts
from kernels.step import sampling_columns
from kernels.step.seq_slot_tables import SeqSlotTables

_ALLOWED, _BIAS = tl.constexpr(sampling_columns.ALLOWED), tl.constexpr(sampling_columns.BIAS)
_PENALTIES = tl.constexpr(sampling_columns.PENALTIES)
_MIN_TOKENS = tl.constexpr(sampling_columns.MIN_TOKENS)


class RowMasks(NamedTuple):
    """Masks of some of R rows, for one step.

    Attributes:
        mask_ids: int32 [R], which of `masks` the row has; -1: none.
        masks: int32 [N, ceil(V / 32)]; bit t % 32 of word t // 32: token t may be drawn.
    """

    mask_ids: Tensor
    masks: Tensor


def adjust_logits(
    logits: Tensor,
    tables: SeqSlotTables,
    slots: Tensor,
    counts: TokenCounts,
    masks: RowMasks | None = None,
) -> None:
    """Add the biases, penalise repetition, then frequency and presence, then forbid tokens.

    Forbidden are tokens that are not in the allowed tokens of the slot or in the mask of the row,
    and stop tokens while there are fewer than `min_tokens` output tokens. In rows with a bias or a
    repetition penalty NaN becomes -inf and infinity the largest float: extreme values overflow, and
    an infinite logit leaves no distribution to sample from.

    Args:
        logits: float32 [R, V]; rows may be strided. Changed in place.
        tables: for a vocabulary of V tokens.
        slots: int32 [R]; a row with -1 is left as it is.
        counts: of the tokens of all slots with penalties, brought up to date by `count_tokens`.
        masks: of the rows that have one; None if none has.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(logits, tables, slots, counts, masks)
    if not device.runs_triton(logits):
        _torch(logits, tables, slots, counts, masks)
    elif logits.numel():
        _launch(logits, tables, slots, counts, masks)


def reference(
    logits: Tensor,
    tables: SeqSlotTables,
    slots: Tensor,
    counts: TokenCounts,
    masks: RowMasks | None = None,
) -> Tensor:
    """Return the adjusted logits."""
    logits = logits.clone()
    _torch(logits, tables, slots, counts, masks)
    return logits


def _torch(
    logits: Tensor,
    tables: SeqSlotTables,
    slots: Tensor,
    counts: TokenCounts,
    masks: RowMasks | None,
) -> None:
    """Adjust row by row, and only tokens that are biased, occurred before or are forbidden."""
    mask_ids = [-1] * len(logits) if masks is None else masks.mask_ids.tolist()
    for row, slot, mask_id in zip(logits, slots.tolist(), mask_ids, strict=True):
        features = int(tables.features[slot]) if slot >= 0 else 0
        if features & sampling_columns.BIAS:
            entries = slice(int(tables.num_biases[slot]))
            row[tables.bias_token_ids[slot, entries].long()] += tables.bias_values[slot, entries]
        penalises_repetition = False
        if features & sampling_columns.PENALTIES:
            penalises_repetition = bool(tables.repetition_penalty[slot] != 1)
            _torch_penalties(row, tables, slot, counts, penalises_repetition)
        if features & sampling_columns.BIAS or penalises_repetition:
            row.copy_(logit_order.reference(row))
        if features & sampling_columns.MIN_TOKENS:
            num_outputs = tables.num_tokens[slot] - tables.num_prompt_tokens[slot]
            stops = tables.stop_token_ids[slot]
            stops = stops[(stops >= 0) & (stops < len(row))]
            row[stops.long()] = torch.where(
                num_outputs < tables.min_tokens[slot], -torch.inf, row[stops.long()]
            )
        if features & sampling_columns.ALLOWED:
            row.masked_fill_(~_torch_bits(tables.allowed_tokens[slot], len(row)), -torch.inf)
        if masks is not None and slot >= 0 and mask_id >= 0:
            row.masked_fill_(~_torch_bits(masks.masks[mask_id], len(row)), -torch.inf)


def _torch_penalties(
    row: Tensor, tables: SeqSlotTables, slot: int, counts: TokenCounts, penalises_repetition: bool
) -> None:
    said = counts.output_counts[slot]
    if penalises_repetition:
        seen = (_torch_bits(counts.prompt_mask[slot], len(said)) | (said > 0)).nonzero()[:, 0]
        value, penalty = row[seen], tables.repetition_penalty[slot]
        row[seen] = torch.where(value > 0, value / penalty, value * penalty)
    output = said.nonzero()[:, 0]
    frequency, presence = tables.frequency_penalty[slot], tables.presence_penalty[slot]
    row[output] -= frequency * said[output] + presence


def _torch_bits(words: Tensor, size: int) -> Tensor:
    """Return the first bits of int32 `words`, the lowest of each first: bool [size]."""
    bits = np.unpackbits(words.cpu().numpy().view(np.uint8), count=size, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_)).to(words.device)


@triton.jit
def _kernel(
    logits_ptr,
    slots_ptr,
    mask_ids_ptr,
    masks_ptr,
    features_ptr,
    allowed_tokens_ptr,
    bias_token_ids_ptr,
    bias_values_ptr,
    num_biases_ptr,
    stop_token_ids_ptr,
    min_tokens_ptr,
    num_tokens_ptr,
    num_prompt_tokens_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    prompt_mask_ptr,
    output_counts_ptr,
    row_stride,
    vocab,
    num_words,
    max_biases,
    num_stop_token_ids,
    WORDS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    i_block, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + i_row).to(tl.int64)
    if slot < 0:
        return
    features = tl.load(features_ptr + slot)
    i_mask = tl.full([], -1, tl.int64)
    if masks_ptr is not None:
        i_mask = tl.load(mask_ids_ptr + i_row).to(tl.int64)
    is_early = (features & _MIN_TOKENS) > 0
    if is_early:
        num_outputs = tl.load(num_tokens_ptr + slot) - tl.load(num_prompt_tokens_ptr + slot)
        is_early = num_outputs < tl.load(min_tokens_ptr + slot)
    if ((features & (_ALLOWED | _BIAS | _PENALTIES)) == 0) & (i_mask < 0) & (is_early == 0):
        return

    p_row = logits_ptr + i_row * row_stride
    first = i_block * WORDS * 32
    if (features & _BIAS) > 0:
        num_biases = tl.load(num_biases_ptr + slot)
        for i_entry in range(0, num_biases, ENTRIES):
            o = i_entry + tl.arange(0, ENTRIES)
            p_tokens = bias_token_ids_ptr + slot * max_biases + o
            b_tokens = tl.load(p_tokens, mask=o < num_biases, other=-1)
            m = (b_tokens >= first) & (b_tokens < tl.minimum(first + WORDS * 32, vocab))
            b_biases = tl.load(bias_values_ptr + slot * max_biases + o, mask=m)
            tl.store(p_row + b_tokens, tl.load(p_row + b_tokens, mask=m) + b_biases, mask=m)
        tl.debug_barrier()  # other threads read what these have stored

    o_words = i_block * WORDS + tl.arange(0, WORDS)
    o_bits = tl.arange(0, 32)
    o_tokens = o_words[:, None] * 32 + o_bits[None, :]  # [WORDS, 32]
    m_words, m = o_words < num_words, o_tokens < vocab
    b_logits = tl.load(p_row + o_tokens, mask=m, other=0.0)
    b_out = b_logits
    repetition = 1.0
    if (features & _PENALTIES) > 0:
        repetition = tl.load(repetition_ptr + slot)
        b_counts = tl.load(output_counts_ptr + slot * vocab + o_tokens, mask=m, other=0)
        if repetition != 1.0:
            p_prompt = prompt_mask_ptr + slot * num_words + o_words
            b_prompt = tl.load(p_prompt, mask=m_words, other=0)
            b_seen = ((b_prompt[:, None] >> o_bits[None, :]) & 1) | b_counts
            b_less = tl.where(b_out > 0.0, tl.div_rn(b_out, repetition), b_out * repetition)
            b_out = tl.where(b_seen > 0, b_less, b_out)
        presence, frequency = tl.load(presence_ptr + slot), tl.load(frequency_ptr + slot)
        b_less = b_out - (frequency * b_counts.to(tl.float32) + presence)
        b_out = tl.where(b_counts > 0, b_less, b_out)
    if ((features & _BIAS) > 0) | (repetition != 1.0):
        b_out = cleaned(b_out)
    if is_early:
        for i_stop in range(num_stop_token_ids):
            stop = tl.load(stop_token_ids_ptr + slot * num_stop_token_ids + i_stop)
            b_out = tl.where(o_tokens == stop, float("-inf"), b_out)
    b_words = tl.full([WORDS], -1, tl.int32)
    if (features & _ALLOWED) > 0:
        b_words = tl.load(allowed_tokens_ptr + slot * num_words + o_words, mask=m_words, other=0)
    if masks_ptr is not None:
        m_mask = o_words < tl.where(i_mask >= 0, num_words, 0)
        b_words &= tl.load(masks_ptr + i_mask * num_words + o_words, mask=m_mask, other=-1)
    b_allowed = (b_words[:, None] >> o_bits[None, :]) & 1
    b_out = tl.where(b_allowed > 0, b_out, float("-inf"))
    # Most logits are unchanged. The comparison holds for NaN too: it differs from itself.
    tl.store(p_row + o_tokens, b_out, mask=m & (b_out != b_logits))


def settings() -> dict[str, int]:
    """Return words and list entries per program, and warps: 16 tokens and 2 entries per thread."""
    return {"WORDS": 64, "ENTRIES": 256, "num_warps": 4}


def _launch(
    logits: Tensor,
    tables: SeqSlotTables,
    slots: Tensor,
    counts: TokenCounts,
    masks: RowMasks | None,
) -> None:
    num_rows, vocab = logits.shape
    num_words = tables.allowed_tokens.shape[1]
    division = settings()
    _kernel[(cdiv(num_words, division["WORDS"]), num_rows)](
        logits_ptr=logits,
        slots_ptr=slots,
        mask_ids_ptr=None if masks is None else masks.mask_ids,
        masks_ptr=None if masks is None else masks.masks,
        features_ptr=tables.features,
        allowed_tokens_ptr=tables.allowed_tokens,
        bias_token_ids_ptr=tables.bias_token_ids,
        bias_values_ptr=tables.bias_values,
        num_biases_ptr=tables.num_biases,
        stop_token_ids_ptr=tables.stop_token_ids,
        min_tokens_ptr=tables.min_tokens,
        num_tokens_ptr=tables.num_tokens,
        num_prompt_tokens_ptr=tables.num_prompt_tokens,
        repetition_ptr=tables.repetition_penalty,
        presence_ptr=tables.presence_penalty,
        frequency_ptr=tables.frequency_penalty,
        prompt_mask_ptr=counts.prompt_mask,
        output_counts_ptr=counts.output_counts,
        row_stride=logits.stride(0),
        vocab=vocab,
        num_words=num_words,
        max_biases=tables.bias_values.shape[1],
        num_stop_token_ids=tables.stop_token_ids.shape[1],
        **division,
        # Multiply, round, then add, as torch does.
        enable_fp_fusion=False,
    )


def _check(
    logits: Tensor,
    tables: SeqSlotTables,
    slots: Tensor,
    counts: TokenCounts,
    masks: RowMasks | None,
) -> None:
    check_dtype("logits", logits, torch.float32)
    check_shape("logits", logits, (None, None))
    check_last_stride("logits", logits)
    num_rows, vocab = logits.shape
    num_words = cdiv(vocab, 32)
    check_shape("allowed_tokens", tables.allowed_tokens, (None, num_words))
    counts.check()
    check_shape("output_counts", counts.output_counts, (None, vocab))
    check_device("output_counts", counts.output_counts, logits.device)
    columns: list[tuple[str, Tensor, tuple[int | None, ...]]] = [("slots", slots, (num_rows,))]
    if masks is not None:
        columns.append(("mask_ids", masks.mask_ids, (num_rows,)))
        columns.append(("masks", masks.masks, (None, num_words)))
    for name, column, shape in columns:
        check_dtype(name, column, torch.int32)
        check_shape(name, column, shape)
        check_contiguous(name, column)
        check_device(name, column, logits.device)
