"""Block tables of a sequence or of a prefix, one for each group of layers."""

from __future__ import annotations

from collections.abc import Iterator

from engine.core.kv.block_pool import NULL_BLOCK

# Block ids per KV group, indexed by logical block; NULL_BLOCK = freed or absent. A table without
# any block is empty.
Tables = list[list[int]]


def num_logical_blocks(tables: Tables) -> int:
    """Return the number of logical blocks that every group has."""
    return min(map(len, tables), default=0)


def blocks_of(tables: Tables) -> Iterator[int]:
    """Yield the block ids of all groups, in the order of the logical blocks."""
    return (block for table in tables for block in table if block != NULL_BLOCK)
