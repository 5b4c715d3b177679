"""GroupWindows: how many KV blocks a sequence needs in each group of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

# A sequence that is preempted goes back to its last token that the host has read: so many tokens
# before what is computed the blocks of a window are kept.
_MOST_UNREAD = 2


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks of `block_size` tokens hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class GroupWindows:
    """The windows of the groups, over blocks of `block_size` tokens.

    Attributes:
        windows: of each group, positions that a token sees, its own included; None: all.
        counts: how many groups have each window.
        block_size: as given.
        are_there: whether any group has a window.
        without: the groups that have none.

    Args:
        max_step_tokens: most tokens of one sequence that a step computes.
    """

    def __init__(
        self, windows: Sequence[int | None], block_size: int, *, max_step_tokens: int
    ) -> None:
        self.windows = tuple(windows)
        self.counts = Counter(self.windows)
        self.without = [group for group, window in enumerate(self.windows) if window is None]
        self.are_there = len(self.without) < len(self.windows)
        self.block_size = block_size
        self._max_step_tokens = max_step_tokens

    def first_seen(self, window: int | None, position: int) -> int:
        """Return the first logical block that the token at `position` attends to."""
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def first_block(self, window: int | None, num_computed_tokens: int) -> int:
        """Return the first logical block still inside the window after `num_computed_tokens`."""
        return self.first_seen(window, num_computed_tokens - _MOST_UNREAD)

    def most_blocks(self, window: int | None, num_tokens: int) -> int:
        """Return how many blocks a sequence of `num_tokens` holds at most in one group."""
        num_blocks = blocks_for(num_tokens, self.block_size)
        if window is None:
            return num_blocks
        # What a step reads and what it writes, which begins and ends within blocks.
        seen = window + _MOST_UNREAD + self._max_step_tokens
        return min(num_blocks, blocks_for(seen, self.block_size) + 1)

    def sequence_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of `num_tokens` holds at most in all groups."""
        return sum(
            count * self.most_blocks(window, num_tokens) for window, count in self.counts.items()
        )

    def longest_sequence(self, num_blocks: int) -> int:
        """Return the tokens of the longest sequence that fits into `num_blocks` blocks.

        With windows in all groups it may be any: 2**31 - 1.
        """
        low, high = 0, 2**31 // self.block_size
        while low + 1 < high:
            middle = (low + high) // 2
            fits = self.sequence_blocks(middle * self.block_size) <= num_blocks
            low, high = (middle, high) if fits else (low, middle)
        return min(low * self.block_size, 2**31 - 1)
