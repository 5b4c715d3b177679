"""The kernels of `draw`: one pass over the logits, then passes over a short list of groups.

`scan_kernel` runs once per chunk of each row, the two others once per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.draw_list import cut_after, mass_within, winner_within
from kernels.sampling.draw_rules import inverse_temperature, mass, numbers_of, rules_of, weight
from kernels.sampling.logit_order import LOWEST_KEY, cleaned, first_of, from_key, to_key
from kernels.sampling.philox import tile_exponentials, token_exponentials


@triton.jit
def scan_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    num_tokens_ptr,
    num_prompt_tokens_ptr,
    peaks_ptr,
    winners_ptr,
    masses_ptr,
    maxima_ptr,
    row_stride,
    vocab,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Reduce one chunk of a row, as its sampling parameters require.

    Greedy rows store the first token of the maximum, unfiltered rows the winner of the chunk,
    filtered rows the maximum of each group and, with top_p alone, the mass of the chunk.
    """
    i_chunk, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + i_row).to(tl.int64)
    if slot < 0:
        return
    i_out = i_row * tl.num_programs(0) + i_chunk
    o_groups = i_chunk * GROUPS + tl.arange(0, GROUPS)
    o_tokens = o_groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    p_logits = logits_ptr + i_row * row_stride + o_tokens
    b_logits = cleaned(tl.load(p_logits, mask=o_tokens < vocab, other=float("-inf")))
    peak = tl.max(b_logits)
    tl.store(peaks_ptr + i_out, peak)

    temperature, top_k, _, min_p, filtered = rules_of(
        slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab
    )
    rate = inverse_temperature(temperature)
    if filtered:
        p_maxima = maxima_ptr + i_row * num_groups + o_groups
        tl.store(p_maxima, tl.max(b_logits, axis=1), mask=o_groups < num_groups)
        if (top_k == 0) & (min_p <= 0.0):
            tl.store(masses_ptr + i_out, tl.sum(mass(weight(b_logits, peak, rate))))
    elif temperature > 0.0:
        o_quads = o_groups[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
        seed, position = numbers_of(slot, seeds_ptr, num_tokens_ptr, num_prompt_tokens_ptr)
        b_times = tile_exponentials(seed, position, o_quads, GROUPS, GROUP)
        b_scores = weight(b_logits, peak, rate) / b_times
        tl.store(winners_ptr + i_out, first_of(o_tokens, b_scores, tl.max(b_scores)))
    else:
        tl.store(winners_ptr + i_out, first_of(o_tokens, b_logits, peak))


@triton.jit
def shortlist_kernel(
    maxima_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    lists_ptr,
    lengths_ptr,
    bounds_ptr,
    vocab,
    num_groups,
    FEWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the groups of a filtered row that can hold kept tokens, in ascending order.

    With top_k, or with top_p alone, the list holds every token that reaches a bound, reached by
    top_k to 2 top_k groups, or FEWEST to 2 FEWEST. With min_p and no top_k it holds every token
    that min_p keeps, and the bound drops none.
    """
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + i_row).to(tl.int64)
    if slot < 0:
        return
    temperature, top_k, _, min_p, filtered = rules_of(
        slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab
    )
    if filtered:
        o = tl.arange(0, BLOCK)
        m = o < num_groups
        b_maxima = tl.load(maxima_ptr + i_row * num_groups + o, mask=m, other=float("-inf"))
        peak = tl.max(b_maxima)
        bound = float("-inf")
        if (top_k == 0) & (min_p > 0.0):
            m &= weight(b_maxima, peak, inverse_temperature(temperature)) >= min_p
        else:
            bound = _bound(b_maxima, m, peak, num_groups, tl.where(top_k > 0, top_k, FEWEST))
            m &= b_maxima >= bound
        b_one = m.to(tl.int32)
        p_list = lists_ptr + i_row * num_groups + tl.cumsum(b_one, axis=0) - 1
        tl.store(p_list, o, mask=m)
        tl.store(lengths_ptr + i_row, tl.sum(b_one))
        tl.store(bounds_ptr + i_row, bound)


@triton.jit
def _bound(b_maxima, m, peak, num_groups, wanted):
    """Return a bound that at least `wanted` groups reach; at most twice as many, except ties."""
    low, high = tl.full([], LOWEST_KEY, tl.int64), to_key(peak).to(tl.int64) + 1
    reached = num_groups
    while (reached > 2 * wanted) & (high - low > 1):
        middle = low + (high - low) // 2
        floor = from_key(middle.to(tl.int32))
        count = tl.sum((m & (b_maxima >= floor)).to(tl.int32))
        if count >= wanted:
            low = middle
            reached = count
        else:
            high = middle
    return from_key(low.to(tl.int32))


@triton.jit
def draw_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    num_tokens_ptr,
    num_prompt_tokens_ptr,
    peaks_ptr,
    winners_ptr,
    masses_ptr,
    lists_ptr,
    lengths_ptr,
    bounds_ptr,
    out_ptr,
    row_stride,
    vocab,
    num_groups,
    num_chunks,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Draw a row's token: from its list if it is filtered, otherwise among its chunks' winners."""
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + i_row).to(tl.int64)
    if slot < 0:
        tl.store(out_ptr + i_row, slot * 0)
        return
    p_logits = logits_ptr + i_row * row_stride
    temperature, top_k, top_p, min_p, filtered = rules_of(
        slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab
    )
    rate = inverse_temperature(temperature)
    seed, position = numbers_of(slot, seeds_ptr, num_tokens_ptr, num_prompt_tokens_ptr)
    o_chunks = tl.arange(0, CHUNKS)
    m_chunks = o_chunks < num_chunks
    o_chunks += i_row * num_chunks
    b_peaks = tl.load(peaks_ptr + o_chunks, mask=m_chunks, other=float("-inf"))
    peak = tl.max(b_peaks)

    if filtered:
        p_list, length = lists_ptr + i_row * num_groups, tl.load(lengths_ptr + i_row)
        stored = length
        floor, last = tl.load(bounds_ptr + i_row), vocab
        if top_k > 0:
            floor, last = cut_after(
                p_logits, p_list, length, top_k, floor, peak, vocab, GROUP, TILE
            )
        target = tl.full([], 1, tl.int64)
        if top_p < 1.0:
            listed = mass_within(
                p_logits, p_list, length, stored, floor, last, peak, rate, min_p, vocab, GROUP, TILE
            )
            total = listed
            if (top_k == 0) & (min_p <= 0.0):
                b_masses = tl.load(masses_ptr + o_chunks, mask=m_chunks, other=0)
                b_scale = weight(b_peaks, peak, rate).to(tl.float64)
                total = tl.sum((b_masses.to(tl.float64) * b_scale).to(tl.int64))
            share = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            target = tl.maximum(target, share)
            if listed < target:
                length, stored = num_groups, 0
                floor, last = float("-inf"), vocab
        token = _race(
            p_logits, p_list, length, stored, floor, last, peak, rate, top_p, min_p, target,
            seed, position, vocab, GROUP, TILE,
        )  # fmt: skip
    else:
        b_tokens = tl.load(winners_ptr + o_chunks, mask=m_chunks, other=0)
        b_logits = cleaned(tl.load(p_logits + b_tokens, mask=m_chunks, other=float("-inf")))
        b_times = token_exponentials(seed, position, b_tokens)
        b_scores = tl.where(temperature > 0.0, weight(b_logits, peak, rate) / b_times, b_logits)
        token = first_of(b_tokens, b_scores, tl.max(b_scores))
    tl.store(out_ptr + i_row, token.to(tl.int64))


@triton.jit
def _race(
    p_logits,
    p_list,
    length,
    stored,
    floor,
    last,
    peak,
    rate,
    top_p,
    min_p,
    target,
    seed,
    position,
    vocab,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Race until mass < target before the winner, dropping each winner that fails; return it."""
    token = 0
    before = target
    while before >= target:
        token = winner_within(
            p_logits, p_list, length, stored, floor, last, peak, rate, min_p, seed, position,
            vocab, GROUP, TILE,
        )  # fmt: skip
        # From now on only tokens that rank before it are kept.
        floor, last = cleaned(tl.load(p_logits + token)), token - 1
        before = target - target
        if top_p < 1.0:
            before = mass_within(
                p_logits, p_list, length, stored, floor, last, peak, rate, min_p, vocab, GROUP, TILE
            )
    return token
