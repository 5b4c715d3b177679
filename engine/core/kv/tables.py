"""Tables: the blocks of a sequence, or of a prefix."""

from __future__ import annotations

from collections.abc import Iterator

from engine.core.kv.block_pool import NULL_BLOCK

# Of each group of layers, the blocks by place; the null block where there is none. Without any
# block it is empty.
Tables = list[list[int]]


def num_places(tables: Tables) -> int:
    """Return how many places have a block in every group."""
    return min(map(len, tables), default=0)


def blocks_of(tables: Tables) -> Iterator[int]:
    """Yield the blocks of all groups, by place in each."""
    return (block for table in tables for block in table if block != NULL_BLOCK)
