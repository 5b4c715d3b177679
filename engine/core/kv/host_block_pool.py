"""HostBlockPool: blocks of host memory for swapped-out KV."""

from __future__ import annotations

from collections.abc import Iterable


class HostBlockPool:
    """Blocks with at most one owner each. The pool may be empty."""

    def __init__(self, num_blocks: int) -> None:
        """Create a pool of `num_blocks`, all free."""
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks; None if there are too few."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, block_ids: Iterable[int]) -> None:
        """Give blocks back."""
        self._free.extend(block_ids)

    def check_idle(self) -> None:
        """Assert, by counters alone, that no block has an owner."""
        assert self.num_free == self.num_blocks, f"{self.num_blocks - self.num_free} blocks lost"

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Assert that every block is either free or in `owned`, exactly once."""
        assert sorted([*self._free, *owned]) == list(range(self.num_blocks))
