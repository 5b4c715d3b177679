"""Counter-based random numbers that depend only on a request's seed, a position and a token.

Philox-4x32-10 is a bijection that turns a key and a counter into four random words (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", 2011). The key is the seed. The counter is

    (token // 4, 0, low half of the position, high half of the position)

and token t takes word t % 4. So a draw depends neither on the batch nor on the row nor on how the
vocabulary is tiled, and four adjacent tokens share one evaluation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import cdiv

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@triton.jit
def random_words(seed, position, o_quads):
    """Return the four words of tokens 4q .. 4q + 3, for each q of `o_quads`: uint32 [...] each.

    `seed` and `position` are int64 scalars; `o_quads` is an int32 block.
    """
    b_quads = o_quads.to(tl.uint32)
    b_zero = tl.zeros_like(b_quads)
    b_low = b_zero + (position & 0xFFFFFFFF).to(tl.uint32)
    b_high = b_zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, b_quads, b_zero, b_low, b_high)


@triton.jit
def tile_exponentials(seed, position, o_quads, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return exponentials of a tile [ROWS, COLUMNS] of tokens, given its quads [ROWS, COLUMNS / 4].

    Each row holds adjacent tokens and starts at a multiple of four.
    """
    b_0, b_1, b_2, b_3 = random_words(seed, position, o_quads)
    b_words = tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))  # [ROWS, COLUMNS / 4, 2, 2]
    return to_exponential(tl.reshape(b_words, (ROWS, COLUMNS)))


@triton.jit
def token_exponentials(seed, position, o_tokens):
    """Return exponentials of arbitrary single tokens: float32, of the shape of `o_tokens`."""
    b_0, b_1, b_2, b_3 = random_words(seed, position, o_tokens // 4)
    b_pair = tl.where(o_tokens % 2 == 0, b_0, b_1)
    b_other = tl.where(o_tokens % 2 == 0, b_2, b_3)
    return to_exponential(tl.where(o_tokens % 4 < 2, b_pair, b_other))


@triton.jit
def to_exponential(b_words):
    """Return -log(1 - u) with u = (word + 1/2) / 2^32: exponentially distributed, in float32.

    The smallest of V numbers decides the draw, and it is about 1 / V. So a small u keeps all bits
    of its word, and a series replaces the logarithm of a number near 1. 1 - u is computed from the
    complemented word, so that neither tail loses precision and nothing is 0 or infinite.
    """
    b_u = (b_words.to(tl.float32) + 0.5) * 2.0**-32
    b_v = ((~b_words).to(tl.float32) + 0.5) * 2.0**-32
    b_series = b_u * (1 + b_u * (1 / 2 + b_u * (1 / 3 + b_u * (1 / 4 + b_u * (1 / 5)))))
    return tl.where(b_u < 0.0625, b_series, -tl.log(b_v))


def philox_reference(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the four words for four counters and two keys, all int64 holding 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products wrap at 2^64; their bits are those of the unsigned product.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def words_reference(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Return the word of every token: int64 [R, num_tokens] of 32 bits, for int64 [R] each."""
    quads = torch.arange(cdiv(num_tokens, 4), device=seeds.device)
    seeds, positions = seeds[:, None], positions[:, None]
    counter = (quads, torch.zeros_like(quads), positions & _MASK, (positions >> 32) & _MASK)
    words = philox_reference(counter, (seeds & _MASK, (seeds >> 32) & _MASK))
    return torch.stack(words, dim=-1).flatten(1)[:, :num_tokens]


def exponentials_reference(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Return the exponential of every token in float64 [R, num_tokens], correctly rounded."""
    words = words_reference(seeds, positions, num_tokens)
    return -torch.log1p(-(words.double() + 0.5) * 2.0**-32)
