"""Passes of one program over the tokens of a list of groups, used by `draw_kernel`.

A list has `length` groups in ascending order, of which `stored` are in memory: all, or none if the
whole row is read. A cut is the last token kept when tokens are sorted by descending logit and
ascending index: tokens above `floor` and, of those equal to it, those up to index `last`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.draw_rules import mass, weight
from kernels.sampling.logit_order import cleaned, first_of, from_key, to_key
from kernels.sampling.philox import tile_exponentials


@triton.jit
def _tile(p_logits, p_list, start, length, stored, vocab, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Return logits, token ids, their mask, and groups, from `start` on in the list."""
    o_list = start + tl.arange(0, TILE)
    m_list = o_list < length
    m_stored = o_list < stored
    b_groups = tl.where(m_stored, tl.load(p_list + o_list, mask=m_stored, other=0), o_list)
    o_tokens = b_groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [TILE, GROUP]
    m = m_list[:, None] & (o_tokens < vocab)
    b_logits = cleaned(tl.load(p_logits + o_tokens, mask=m, other=float("-inf")))
    return b_logits, o_tokens, m, b_groups


@triton.jit
def cut_after(
    p_logits, p_list, length, top_k, bound, peak, vocab, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """Return the cut (floor, last) that keeps top_k tokens; at least so many reach `bound`.

    The floor is found by bisection on integers that sort as the logits do. Each step moves an end
    to a logit that occurs: the steps grow with the number of distinct logits, not of bits.
    """
    high = to_key(peak).to(tl.int64) + 1
    reached, lowest, _ = _count(p_logits, p_list, length, bound, vocab, GROUP, TILE)
    low = to_key(lowest).to(tl.int64)
    above = 0
    while (reached > top_k) & (high - low > 1):
        middle = from_key((low + (high - low) // 2).to(tl.int32))
        count, lowest, highest = _count(p_logits, p_list, length, middle, vocab, GROUP, TILE)
        if count >= top_k:
            low = to_key(lowest).to(tl.int64)
            reached = count
        else:
            high = to_key(highest).to(tl.int64) + 1
            above = count
    floor = from_key(low.to(tl.int32))
    last = vocab
    if reached > top_k:
        last = _nth_on(p_logits, p_list, length, floor, top_k - above, vocab, GROUP, TILE)
    return floor, last


@triton.jit
def _count(p_logits, p_list, length, floor, vocab, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Return how many tokens reach `floor`, the lowest such logit, and the highest below it."""
    b_count = tl.zeros([TILE, GROUP], tl.int32)
    b_lowest = tl.full([TILE, GROUP], float("inf"), tl.float32)
    b_highest = tl.full([TILE, GROUP], float("-inf"), tl.float32)
    for start in range(0, length, TILE):
        b_logits, _, m, _ = _tile(p_logits, p_list, start, length, length, vocab, GROUP, TILE)
        m_reach = m & (b_logits >= floor)
        b_count += m_reach.to(tl.int32)
        b_lowest = tl.minimum(b_lowest, tl.where(m_reach, b_logits, float("inf")))
        b_highest = tl.maximum(b_highest, tl.where(m_reach, float("-inf"), b_logits))
    return tl.sum(b_count), tl.min(b_lowest), tl.max(b_highest)


@triton.jit
def _nth_on(p_logits, p_list, length, floor, n, vocab, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Return the n-th token, by index, whose logit is `floor`."""
    token = -1
    seen = 0
    for start in range(0, length, TILE):
        b_logits, o_tokens, m, _ = _tile(
            p_logits, p_list, start, length, length, vocab, GROUP, TILE
        )
        b_tied = tl.reshape((m & (b_logits == floor)).to(tl.int32), (TILE * GROUP,))
        b_rank = tl.cumsum(b_tied, axis=0) * b_tied + seen * b_tied
        b_tokens = tl.reshape(o_tokens, (TILE * GROUP,))
        token = tl.maximum(token, tl.max(tl.where(b_rank == n, b_tokens, -1)))
        seen += tl.sum(b_tied)
    return token


@triton.jit
def _keeps(b_logits, o_tokens, floor, last):
    return (b_logits > floor) | ((b_logits == floor) & (o_tokens <= last))


@triton.jit
def mass_within(
    p_logits,
    p_list,
    length,
    stored,
    floor,
    last,
    peak,
    rate,
    min_p,
    vocab,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the mass of the tokens that the cut and min_p keep."""
    b_mass = tl.zeros([TILE, GROUP], tl.int64)
    for start in range(0, length, TILE):
        b_logits, o_tokens, m, _ = _tile(
            p_logits, p_list, start, length, stored, vocab, GROUP, TILE
        )
        b_weights = weight(b_logits, peak, rate)
        m &= _keeps(b_logits, o_tokens, floor, last) & (b_weights >= min_p)
        b_mass += tl.where(m, mass(b_weights), 0)
    return tl.sum(b_mass)


@triton.jit
def winner_within(
    p_logits,
    p_list,
    length,
    stored,
    floor,
    last,
    peak,
    rate,
    min_p,
    seed,
    position,
    vocab,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the winner of the tokens that the cut and min_p keep; 0 if they keep none."""
    best = -1.0
    winner = 0
    for start in range(0, length, TILE):
        b_logits, o_tokens, m, b_groups = _tile(
            p_logits, p_list, start, length, stored, vocab, GROUP, TILE
        )
        b_weights = weight(b_logits, peak, rate)
        m &= _keeps(b_logits, o_tokens, floor, last) & (b_weights >= min_p)
        o_quads = b_groups[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
        b_times = tile_exponentials(seed, position, o_quads, TILE, GROUP)
        b_scores = tl.where(m, b_weights / b_times, -1.0)
        score = tl.max(b_scores)
        if score > best:
            best = score
            winner = first_of(o_tokens, b_scores, score)
    return winner
