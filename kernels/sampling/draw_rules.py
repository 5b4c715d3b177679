"""Definitions shared by the kernels of `draw`: which rows are filtered, and a token's weight."""

from __future__ import annotations

import triton
import triton.language as tl

# Masses are integers, so that sums are exact in any order: a weight of 1 is 2^40, and weights below
# 2^-40 are dropped. 2^22 weights fit into an int64.
UNIT = tl.constexpr(2.0**40)
_LOG2_E = tl.constexpr(1.4426950408889634)
_COLDEST, _HOTTEST = tl.constexpr(2.0**-100), tl.constexpr(2.0**100)


@triton.jit
def rules_of(slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab):
    """Return a slot's temperature, top_k (0 if it keeps all), top_p, min_p, and if it is filtered.

    It is filtered if a filter can drop a token and it is not greedy (temperature 0).
    """
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0)
    top_p, min_p = tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
    filtered = (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return temperature, top_k, top_p, min_p, filtered


@triton.jit
def numbers_of(slot, seeds_ptr, num_tokens_ptr, num_prompt_tokens_ptr):
    """Return the seed and the position that determine the random numbers of a slot's next token."""
    position = tl.load(num_tokens_ptr + slot) - tl.load(num_prompt_tokens_ptr + slot)
    return tl.load(seeds_ptr + slot), position.to(tl.int64)


@triton.jit
def inverse_temperature(temperature):
    """Return log2(e) / temperature, clamped: past 2^-100 and 2^100 the result no longer changes."""
    return _LOG2_E / tl.minimum(tl.maximum(temperature, _COLDEST), _HOTTEST)


@triton.jit
def weight(b_logits, peak, rate):
    """Return exp((logit - peak) / temperature): 1 at the peak, 0 where forbidden."""
    return tl.exp2((b_logits - tl.where(peak == float("-inf"), 0.0, peak)) * rate)


@triton.jit
def mass(b_weights):
    return (b_weights * UNIT).to(tl.int64)
