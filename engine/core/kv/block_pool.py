"""BlockPool: the KV blocks, with their reference counts and cached content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

NULL_BLOCK = 0


class BlockPool:
    """Reference-counted blocks; free ones keep their cached content until they are evicted.

    A full block is addressed by the hash of its content. Free blocks without cached content are
    taken first, then those with content, least recently used first. Block 0 is the null block: it
    pads block tables and is never handed out.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[bytes], None] = lambda content_hash: None
    ) -> None:
        """Create a pool of `num_blocks`, including the null block.

        Args:
            on_evict: called with each content hash that is not found any more.
        """
        assert num_blocks >= 2
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free_empty: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._free_cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that no sequence refers to, with cached content or without."""
        return len(self._free_empty) + len(self._free_cached)

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_cached(self) -> int:
        """Blocks, in use or free, that are found by their content."""
        return len(self._block_of)

    def ref_count(self, block_id: int) -> int:
        """Return how many sequences refer to a block."""
        return self._ref_counts[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Whether a block is found by its content."""
        return self._hash_of[block_id] is not None

    def find(self, content_hash: bytes) -> int | None:
        """Return the block with this content, in use or free; None if there is none."""
        return self._block_of.get(content_hash)

    def allocate(self, count: int, *, after: int = NULL_BLOCK) -> list[int] | None:
        """Take `count` free blocks with one reference each; None if there are too few.

        The block that follows `after` in memory is preferred if it is free and has no cached
        content, so that sequences tend to be contiguous; correctness does not depend on it.
        """
        if count > self.num_free:
            return None
        taken: list[int] = []
        for _ in range(count):
            after = self._take(after)
            taken.append(after)
        return taken

    def _take(self, after: int) -> int:
        adjacent = NULL_BLOCK if after == NULL_BLOCK else after + 1
        if adjacent in self._free_empty:
            block_id = adjacent
            del self._free_empty[block_id]
        elif self._free_empty:
            block_id, _ = self._free_empty.popitem(last=False)
        else:
            block_id = self._take_cached()
            self._evict(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _take_cached(self) -> int:
        """Remove a block that is free and has cached content from the free ones; return it."""
        return self._free_cached.popitem(last=False)[0]

    def _evict(self, block_id: int) -> None:
        content_hash = self._hash_of[block_id]
        assert content_hash is not None
        del self._block_of[content_hash]
        self._hash_of[block_id] = None
        self._on_evict(content_hash)

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; free ones are in use again."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free_cached[block_id]  # a free block is found by its cached content only
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block; the first one released is the first one evicted."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} released twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                has_content = self._hash_of[block_id] is not None
                (self._free_cached if has_content else self._free_empty)[block_id] = None

    def commit(self, block_id: int, content_hash: bytes) -> None:
        """Enter a full block in the content index, unless another block has the same content."""
        assert self._ref_counts[block_id] > 0
        if self._hash_of[block_id] is None and content_hash not in self._block_of:
            self._hash_of[block_id] = content_hash
            self._block_of[content_hash] = block_id

    def forget(self, block_ids: Iterable[int]) -> None:
        """Remove blocks in use from the content index: what they hold is not what was entered."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0
            if self._hash_of[block_id] is not None:
                self._evict(block_id)

    def check_idle(self) -> None:
        """Assert, by counters alone, that no block is in use."""
        assert self.num_free == self.num_usable, f"{self.num_usable - self.num_free} blocks lost"

    def check_integrity(self) -> None:
        """Assert that free blocks, reference counts, counters and content index agree.

        Scans every block: for tests and diagnosis.
        """
        assert self._ref_counts[NULL_BLOCK] == 0
        for block_id, count in enumerate(self._ref_counts):
            assert count >= 0
            is_free = block_id != NULL_BLOCK and count == 0
            is_cached = self._hash_of[block_id] is not None
            assert (block_id in self._free_empty) == (is_free and not is_cached)
            assert (block_id in self._free_cached) == (is_free and is_cached)
        for content_hash, block_id in self._block_of.items():
            assert self._hash_of[block_id] == content_hash
        assert sum(content is not None for content in self._hash_of) == len(self._block_of)
