"""Masks of tokens: a bit for each token of the vocabulary, set if the token may be drawn.

int32 [ceil(V / 32)]; bit t % 32 of word t // 32 is that of token t. Bits after the vocabulary's
last are 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def token_mask(token_ids: NDArray[np.int32], num_words: int) -> NDArray[np.int32]:
    """Return the mask of `token_ids`, which are in the vocabulary, in any order."""
    mask = np.zeros(num_words, dtype=np.int32)
    np.bitwise_or.at(mask, token_ids >> 5, _bits(token_ids))
    return mask


def forbid(mask: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
    """Clear the bits of `token_ids`, which are in the vocabulary."""
    np.bitwise_and.at(mask, token_ids >> 5, ~_bits(token_ids))


def _bits(token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.left_shift(np.int32(1), token_ids & 31)
