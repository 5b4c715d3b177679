"""Token occurrences of the running sequences, used by penalties: one slot per sequence.

A bit per prompt token and a count per output token. Both stay on the device, so that a sampled
token is counted without a host synchronisation. A slot of -1 stands for no sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.checks import check_contiguous, check_device, check_dtype, check_shape

_BLOCK = 1024  # tokens or words per program of 4 warps
_MAX_PROGRAMS = 64  # per prompt


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
            torch.zeros(num_slots, triton.cdiv(vocab, 32), dtype=torch.int32, device=device),
            torch.zeros(num_slots, vocab, dtype=torch.int32, device=device),
        )

    def check(self) -> None:
        """Raise `ValueError` unless the tables match in shape and can be written to."""
        check_shape("output_counts", self.output_counts, (None, None))
        slots, vocab = self.output_counts.shape
        check_shape("prompt_mask", self.prompt_mask, (slots, triton.cdiv(vocab, 32)))
        check_device("prompt_mask", self.prompt_mask, self.output_counts.device)
        for name, table in self._asdict().items():
            check_dtype(name, table, torch.int32)
            check_contiguous(name, table)


def reset_slots(counts: TokenCounts, slots: Tensor) -> None:
    """Clear `slots`.

    Args:
        counts: changed in place.
        slots: int32 [P].

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(counts, slots)
    if not device.runs_triton(slots):
        kept = slots[slots >= 0].long()
        counts.prompt_mask[kept] = 0
        counts.output_counts[kept] = 0
        return
    vocab = counts.output_counts.shape[1]
    if slots.shape[0] and vocab:
        _reset_kernel[(triton.cdiv(vocab, _BLOCK), slots.shape[0])](
            prompt_mask_ptr=counts.prompt_mask,
            output_counts_ptr=counts.output_counts,
            slots_ptr=slots,
            vocab=vocab,
            num_words=counts.prompt_mask.shape[1],
            BLOCK=_BLOCK,
            num_warps=4,
        )


def mark_prompt(counts: TokenCounts, slots: Tensor, start_loc: Tensor, token_ids: Tensor) -> None:
    """Assign `slots` to new sequences: clear them, and mark the tokens of the prompts.

    Args:
        counts: changed in place.
        slots: int32 [P], each at most once except -1.
        start_loc: int32 [P + 1]; token_ids[start_loc[i] : start_loc[i + 1]] belong to slots[i].
        token_ids: int32 or int64 [N]; those outside the vocabulary are ignored.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(counts, slots, token_ids)
    check_dtype("start_loc", start_loc, torch.int32)
    check_shape("start_loc", start_loc, (slots.shape[0] + 1,))
    check_contiguous("start_loc", start_loc)
    check_device("start_loc", start_loc, slots.device)
    reset_slots(counts, slots)
    if not device.runs_triton(slots):
        _torch_mark(counts, slots, start_loc, token_ids)
    elif slots.shape[0] and token_ids.shape[0]:
        # The host knows the total length of the prompts, not which one is longest.
        programs = min(triton.cdiv(token_ids.shape[0], _BLOCK), _MAX_PROGRAMS)
        _mark_kernel[(programs, slots.shape[0])](
            prompt_mask_ptr=counts.prompt_mask,
            slots_ptr=slots,
            start_loc_ptr=start_loc,
            token_ids_ptr=token_ids,
            vocab=counts.output_counts.shape[1],
            num_words=counts.prompt_mask.shape[1],
            BLOCK=_BLOCK,
            num_warps=4,
        )


def count_output(counts: TokenCounts, slots: Tensor, token_ids: Tensor) -> None:
    """Count one more token for each of `slots`, which may repeat.

    Args:
        counts: changed in place.
        slots: int32 [N].
        token_ids: int32 or int64 [N]; those outside the vocabulary are ignored.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(counts, slots, token_ids)
    check_shape("token_ids", token_ids, (slots.shape[0],))
    vocab = counts.output_counts.shape[1]
    if not device.runs_triton(slots):
        kept = (slots >= 0) & (token_ids >= 0) & (token_ids < vocab)
        index = slots[kept].long() * vocab + token_ids[kept]
        counts.output_counts.view(-1).index_add_(0, index, torch.ones_like(index).int())
    elif slots.shape[0]:
        _count_kernel[(triton.cdiv(slots.shape[0], _BLOCK),)](
            output_counts_ptr=counts.output_counts,
            slots_ptr=slots,
            token_ids_ptr=token_ids,
            size=slots.shape[0],
            vocab=vocab,
            BLOCK=_BLOCK,
            num_warps=4,
        )


def _torch_mark(counts: TokenCounts, slots: Tensor, start_loc: Tensor, token_ids: Tensor) -> None:
    (_, vocab), words = counts.output_counts.shape, counts.prompt_mask.shape[1]
    weights = 1 << torch.arange(32)
    for row, slot in enumerate(slots.tolist()):
        tokens = token_ids[start_loc[row] : start_loc[row + 1]]
        seen = torch.zeros(words * 32, dtype=torch.int64)
        seen[tokens[(tokens >= 0) & (tokens < vocab)]] = 1
        if slot >= 0:
            counts.prompt_mask[slot] = (seen.view(words, 32) * weights).sum(-1).int()


@triton.jit
def _reset_kernel(
    prompt_mask_ptr, output_counts_ptr, slots_ptr, vocab, num_words, BLOCK: tl.constexpr
):
    i_block, slot = tl.program_id(0), tl.load(slots_ptr + tl.program_id(1)).to(tl.int64)
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    if slot >= 0:
        b_zero = tl.zeros([BLOCK], tl.int32)
        tl.store(output_counts_ptr + slot * vocab + o, b_zero, mask=o < vocab)
        tl.store(prompt_mask_ptr + slot * num_words + o, b_zero, mask=o < num_words)


@triton.jit
def _mark_kernel(
    prompt_mask_ptr,
    slots_ptr,
    start_loc_ptr,
    token_ids_ptr,
    vocab,
    num_words,
    BLOCK: tl.constexpr,
):
    i_first, i_row = tl.program_id(0) * BLOCK, tl.program_id(1)
    slot = tl.load(slots_ptr + i_row).to(tl.int64)
    start, end = tl.load(start_loc_ptr + i_row), tl.load(start_loc_ptr + i_row + 1)
    if slot >= 0:
        for i_token in range(start + i_first, end, tl.num_programs(0) * BLOCK):
            o = i_token + tl.arange(0, BLOCK)
            b_tokens = tl.load(token_ids_ptr + o, mask=o < end, other=-1).to(tl.int32)
            b_bits = tl.full([BLOCK], 1, tl.int32) << (b_tokens & 31)
            p_words = prompt_mask_ptr + slot * num_words + (b_tokens >> 5)
            m = (b_tokens >= 0) & (b_tokens < vocab)
            tl.atomic_or(p_words, b_bits, mask=m, sem="relaxed")


# Not specialised on these arguments: another batch size must not recompile.
@triton.jit(do_not_specialize=["size"])
def _count_kernel(output_counts_ptr, slots_ptr, token_ids_ptr, size, vocab, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_slots = tl.load(slots_ptr + o, mask=o < size, other=-1).to(tl.int64)
    b_tokens = tl.load(token_ids_ptr + o, mask=o < size, other=-1)
    m = (b_slots >= 0) & (b_tokens >= 0) & (b_tokens < vocab)
    p_counts = output_counts_ptr + b_slots * vocab + b_tokens
    tl.atomic_add(p_counts, tl.full([BLOCK], 1, tl.int32), mask=m, sem="relaxed")


def _check(counts: TokenCounts, slots: Tensor, token_ids: Tensor | None = None) -> None:
    counts.check()
    check_dtype("slots", slots, torch.int32)
    check_shape("slots", slots, (None,))
    check_contiguous("slots", slots)
    check_device("slots", slots, counts.output_counts.device)
    if token_ids is not None:
        check_dtype("token_ids", token_ids, torch.int32, torch.int64)
        check_shape("token_ids", token_ids, (None,))
        check_contiguous("token_ids", token_ids)
        check_device("token_ids", token_ids, slots.device)
