"""Random numbers of the CPU's sampler: one per row, of its seed and its position alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
_ROUNDS = 10
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


def uniform_numbers(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each seed and position, [R] each.

    They are those of `np.random.Generator(np.random.Philox(key=seed, counter=position)).random()`,
    whose making takes far longer than the number: Philox-4x64-10 (Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", 2011), of which the first word is used. A preempted or moved
    sequence goes on with the same numbers.
    """
    # Words 0 and 2 of the counter in one array, 1 and 3 in the other. NumPy counts before it draws.
    even = np.zeros((2, len(seeds)), dtype=np.uint64)
    even[0] = positions + 1
    odd = np.zeros_like(even)
    key = np.zeros_like(even)
    key[0] = seeds
    for _ in range(_ROUNDS):
        high, low = _multiply(_MULTIPLIERS, even)
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
        key += _WEYL
    numbers: NDArray[np.float64] = (even[0] >> np.uint64(11)) * 2.0**-53
    return numbers


def _multiply(
    a: NDArray[np.uint64], b: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the high and the low 64 bits of the products, from those of 32-bit halves."""
    a_high, a_low, b_high, b_low = a >> _HALF, a & _LOW, b >> _HALF, b & _LOW
    middle = a_high * b_low + ((a_low * b_low) >> _HALF)
    other = a_low * b_high + (middle & _LOW)
    return a_high * b_high + (middle >> _HALF) + (other >> _HALF), a * b
