"""Token occurrences of the running sequences, used by penalties: one slot per sequence.

A bit per prompt token and a count per output token. Both are made from the tokens in the slot
tables, on the device: a sampled token is counted without a host synchronisation, before the next
one is sampled. One program handles a sequence; all tokens of one that has just got its slot, of
others those since the last time, which is one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from kernels.device import cdiv
from kernels.step import sampling_columns
from kernels.step.seq_slot_tables import SeqSlotTables

_PENALTIES = tl.constexpr(sampling_columns.PENALTIES)


class TokenCounts(NamedTuple):
    """Tables of S slots for a vocabulary of V tokens.

    Attributes:
        prompt_mask: int32 [S, ceil(V / 32)]; bit t % 32 of word t // 32: token t is in the prompt.
        output_counts: int32 [S, V], occurrences of each token in the output.
    """

    prompt_mask: Tensor
    output_counts: Tensor

    @classmethod
    def allocate(cls, num_slots: int, vocab: int, device: torch.device) -> TokenCounts:
        """Return zeroed tables."""
        return cls(
            torch.zeros(num_slots, cdiv(vocab, 32), dtype=torch.int32, device=device),
            torch.zeros(num_slots, vocab, dtype=torch.int32, device=device),
        )

    def check(self) -> None:
        """Raise `ValueError` unless the tables match in shape and can be written to."""
        check_shape("output_counts", self.output_counts, (None, None))
        slots, vocab = self.output_counts.shape
        check_shape("prompt_mask", self.prompt_mask, (slots, cdiv(vocab, 32)))
        check_device("prompt_mask", self.prompt_mask, self.output_counts.device)
        for name, table in self._asdict().items():
            check_dtype(name, table, torch.int32)
            check_contiguous(name, table)


def count_tokens(counts: TokenCounts, tables: SeqSlotTables, slots: Tensor) -> None:
    """Count the tokens of `slots` with penalties that have not been counted yet.

    Args:
        counts: of as many slots as `tables`. Changed in place. Tokens outside the vocabulary are
            ignored.
        tables: `num_counted_tokens` is changed in place; where it is 0, the counts are cleared.
        slots: int32 [R], each at most once except -1, which is skipped. No token of theirs is
            sampled before their whole prompt is in the tables.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    counts.check()
    check_shape("output_counts", counts.output_counts, (tables.num_slots, None))
    check_dtype("slots", slots, torch.int32)
    check_shape("slots", slots, (None,))
    check_contiguous("slots", slots)
    for name, tensor in (("slots", slots), ("tables", tables.buffer)):
        check_device(name, tensor, counts.output_counts.device)
    if not device.runs_triton(slots):
        _torch(counts, tables, slots)
    elif slots.shape[0]:
        _kernel[(slots.shape[0],)](
            prompt_mask_ptr=counts.prompt_mask,
            output_counts_ptr=counts.output_counts,
            slots_ptr=slots,
            features_ptr=tables.features,
            token_ids_ptr=tables.token_ids,
            num_tokens_ptr=tables.num_tokens,
            num_prompt_tokens_ptr=tables.num_prompt_tokens,
            num_counted_tokens_ptr=tables.num_counted_tokens,
            max_model_len=tables.max_model_len,
            vocab=counts.output_counts.shape[1],
            num_words=counts.prompt_mask.shape[1],
            **settings(),
        )


def _torch(counts: TokenCounts, tables: SeqSlotTables, slots: Tensor) -> None:
    vocab, num_words = counts.output_counts.shape[1], counts.prompt_mask.shape[1]
    for slot in slots.tolist():
        if slot < 0 or not int(tables.features[slot]) & sampling_columns.PENALTIES:
            continue
        start, end, num_prompt_tokens = (
            int(column[slot])
            for column in (tables.num_counted_tokens, tables.num_tokens, tables.num_prompt_tokens)
        )
        tokens = tables.token_ids[slot]
        if not start:
            counts.output_counts[slot] = 0
            prompt = tokens[:num_prompt_tokens]
            seen = torch.zeros(32 * num_words, dtype=torch.int64)
            seen[prompt[(prompt >= 0) & (prompt < vocab)].long()] = 1
            bits = seen.view(num_words, 32) << torch.arange(32)
            counts.prompt_mask[slot] = bits.sum(-1).int()
        output = tokens[max(start, num_prompt_tokens) : end]
        output = output[(output >= 0) & (output < vocab)]
        counts.output_counts[slot].index_add_(0, output, torch.ones_like(output))
        tables.num_counted_tokens[slot] = end


@triton.jit
def _kernel(
    prompt_mask_ptr,
    output_counts_ptr,
    slots_ptr,
    features_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    num_prompt_tokens_ptr,
    num_counted_tokens_ptr,
    max_model_len,
    vocab,
    num_words,
    BLOCK: tl.constexpr,
):
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    if slot < 0:
        return
    if (tl.load(features_ptr + slot) & _PENALTIES) > 0:
        start, end = tl.load(num_counted_tokens_ptr + slot), tl.load(num_tokens_ptr + slot)
        num_prompt_tokens = tl.load(num_prompt_tokens_ptr + slot)
        p_words, p_counts = prompt_mask_ptr + slot * num_words, output_counts_ptr + slot * vocab
        o_block = tl.arange(0, BLOCK)
        if start == 0:
            b_zero = tl.zeros([BLOCK], tl.int32)
            for i_token in range(0, vocab, BLOCK):
                tl.store(p_counts + i_token + o_block, b_zero, mask=i_token + o_block < vocab)
            for i_word in range(0, num_words, BLOCK):
                tl.store(p_words + i_word + o_block, b_zero, mask=i_word + o_block < num_words)
        # Other threads add to what these have cleared, and have read what one of them stores.
        tl.debug_barrier()
        for i_token in range(start, end, BLOCK):
            o = i_token + o_block
            b_tokens = tl.load(token_ids_ptr + slot * max_model_len + o, mask=o < end, other=-1)
            m = (b_tokens >= 0) & (b_tokens < vocab)
            b_one = tl.full([BLOCK], 1, tl.int32)
            m_prompt = m & (o < num_prompt_tokens)
            p_prompt = p_words + (b_tokens >> 5)
            tl.atomic_or(p_prompt, b_one << (b_tokens & 31), mask=m_prompt, sem="relaxed")
            m_output = m & (o >= num_prompt_tokens)
            tl.atomic_add(p_counts + b_tokens, b_one, mask=m_output, sem="relaxed")
        tl.store(num_counted_tokens_ptr + slot, end)


def settings() -> dict[str, int]:
    """Return tokens per iteration and warps: 4 tokens per thread."""
    return {"BLOCK": 1024, "num_warps": 8}
