"""RankedQueue: sequences in the order in which they will run."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from engine.core.request import Request

Rank = tuple[int, int, int]


class RankedQueue:
    """A sorted list: an insertion takes O(log n) comparisons, and one move of pointers."""

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        """Order by `rank`, smaller first; ranks are unique and do not change."""
        self._rank = rank
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    @property
    def head(self) -> Request | None:
        """The first sequence, None if empty."""
        return self._requests[0] if self._requests else None

    @property
    def tail(self) -> Request | None:
        """The last sequence, None if empty."""
        return self._requests[-1] if self._requests else None

    def push(self, request: Request) -> None:
        """Insert `request`."""
        insort(self._requests, request, key=self._rank)

    def discard(self, request: Request) -> bool:
        """Remove `request`; return whether it was there."""
        place = bisect_left(self._requests, self._rank(request), key=self._rank)
        found = place < len(self._requests) and self._requests[place] is request
        if found:
            del self._requests[place]
        return found
