"""The order of logits, shared by all kernels that look for the largest ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import cdiv, next_power_of_2

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
LOWEST_KEY = tl.constexpr(-0x7F800001)  # key of -inf

# The maxima of a row's groups must fit into the registers of one program: 16 per thread.
_MAX_GROUPS = 2**13


def group_size(vocab: int) -> int:
    """Return the number of adjacent tokens per group, of which the maximum is stored.

    The first k groups, by descending maximum and ascending index, hold the first k tokens by logit
    and index: each of k groups before another has a token before all tokens of that group.
    16 tokens are 64 bytes, two memory sectors.
    """
    return max(16, next_power_of_2(cdiv(vocab, _MAX_GROUPS)))


@triton.jit
def cleaned(b_logits):
    """Replace NaN by -inf and infinity by the largest float, which gives a total order."""
    b_logits = tl.where(b_logits != b_logits, float("-inf"), b_logits)
    return tl.minimum(b_logits, LARGEST)


@triton.jit
def to_key(b_logits):
    """Return int32 keys that sort as float32 does; both zeros have key 0."""
    b_bits = b_logits.to(tl.int32, bitcast=True)
    b_bits = tl.where(b_logits == 0.0, 0, b_bits)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_key(b_keys):
    """Return the float32 numbers that have these keys."""
    b_bits = b_keys ^ ((b_keys >> 31) & 0x7FFFFFFF)
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def first_of(o_tokens, b_scores, best):
    """Return the lowest token that has the best score."""
    return tl.min(tl.where(b_scores == best, o_tokens, 0x7FFFFFFF))


def reference(logits: Tensor) -> Tensor:
    """Return `logits` as `cleaned` returns them."""
    return logits.nan_to_num(nan=-torch.inf, posinf=LARGEST.value, neginf=-torch.inf)
