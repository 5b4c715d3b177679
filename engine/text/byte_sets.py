"""Sets of bytes, 256 bits each, which pick the tokens that may matter to stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

ByteSets: TypeAlias = NDArray[np.uint64]  # [..., 4]; byte b is bit b % 64 of word b // 64

ANY_TOKEN = 0xFF  # a byte that UTF-8 never has: a member of every token's set


def byte_set(members: Iterable[int]) -> ByteSets:
    """Return the set of bytes `members`, of shape [4]."""
    return np.frombuffer(sum(1 << byte for byte in {*members}).to_bytes(32, "little"), np.uint64)


ALL_BYTES = byte_set(range(256))
EVERY_TOKEN = byte_set([ANY_TOKEN])  # intersects the set of every token


def byte_sets(texts: Sequence[bytes | None]) -> ByteSets:
    """Return, of shape [len(texts), 4], the bytes of each text, and `ANY_TOKEN`; None: all."""
    sets = np.tile(EVERY_TOKEN, (len(texts), 1))
    sets[[text is None for text in texts]] = ALL_BYTES
    members = np.frombuffer(b"".join(text or b"" for text in texts), np.uint8)
    owners = np.repeat(np.arange(len(texts)), [len(text or b"") for text in texts])
    bits = np.uint64(1) << (members % 64).astype(np.uint64)
    np.bitwise_or.at(sets, (owners, members // 64), bits)
    return sets
