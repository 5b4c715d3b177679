"""BlockPool: which KV blocks are in use, by how many, and what cached content they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Reference-counted blocks; unreferenced ones keep their content until they are needed again.

    A full block is addressed by the hash of its content. Free blocks are taken least recently
    used first. Block 0 is the null block: it pads block tables and is never handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        """Create a pool of `num_blocks`, the null block among them."""
        assert num_blocks >= 2
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that no sequence refers to, cached content or not."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can hold at all: every one but the null block."""
        return self.num_blocks - 1

    def ref_count(self, block_id: int) -> int:
        """Return how many sequences refer to a block."""
        return self._ref_counts[block_id]

    def find(self, content_hash: bytes) -> int | None:
        """Return the block that holds this content, in use or free."""
        return self._block_of.get(content_hash)

    def allocate(self, count: int, *, after: int | None = None) -> list[int] | None:
        """Take `count` free blocks with one reference each; None if there are too few.

        The block that follows `after` in memory is preferred while it is free and empty, so that
        a sequence tends to be contiguous; nothing depends on it.
        """
        if count > len(self._free):
            return None
        taken: list[int] = []
        for _ in range(count):
            after = self._take(after)
            taken.append(after)
        return taken

    def _take(self, after: int | None) -> int:
        adjacent = NULL_BLOCK if after is None else after + 1
        if adjacent in self._free and self._hash_of[adjacent] is None:
            block_id = adjacent
            del self._free[block_id]
        else:
            block_id, _ = self._free.popitem(last=False)
        self._forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _forget(self, block_id: int) -> None:
        content_hash = self._hash_of[block_id]
        if content_hash is not None:
            del self._block_of[content_hash]
            self._hash_of[block_id] = None

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block, reviving those that were free."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block; the first one released is the first one evicted."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} released twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None

    def commit(self, block_id: int, content_hash: bytes) -> None:
        """Make the content of a full block findable, unless another block holds the same."""
        assert self._ref_counts[block_id] > 0
        if self._hash_of[block_id] is None and content_hash not in self._block_of:
            self._hash_of[block_id] = content_hash
            self._block_of[content_hash] = block_id

    def check_integrity(self) -> None:
        """Assert that free list, reference counts and content index agree."""
        assert self._ref_counts[NULL_BLOCK] == 0
        assert NULL_BLOCK not in self._free
        for block_id in range(1, self.num_blocks):
            count = self._ref_counts[block_id]
            assert count >= 0
            assert (count == 0) == (block_id in self._free), f"block {block_id} is lost"
        for content_hash, block_id in self._block_of.items():
            assert self._hash_of[block_id] == content_hash
        assert sum(content is not None for content in self._hash_of) == len(self._block_of)
