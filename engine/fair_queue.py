"""FairQueue: what several tenants have wait, in turn by its cost."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of several tenants in the order of self-clocked fair queueing, in O(log n).

    An item ends, in virtual time, as much after the one before it of its tenant as it costs, or
    after the one that was taken last if that is later. The item that ends first is next: so each
    tenant gets the same cost served, and one that has had nothing served is next. The items of one
    tenant keep their order. Not thread-safe.
    """

    def __init__(self) -> None:
        # By the end in virtual time, then by arrival: the end, a unique number, tenant and item.
        self._heap: list[tuple[int, int, str, T]] = []
        self._numbers = count()
        self._now = 0  # in virtual time
        self._ends: dict[str, int] = {}  # of the last item that waits, by tenant

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, item: T, *, cost: int, tenant: str) -> None:
        """Add an item, whose cost is at least 1."""
        end = self._ends[tenant] = max(self._now, self._ends.get(tenant, 0)) + cost
        heappush(self._heap, (end, next(self._numbers), tenant, item))

    def pop(self) -> T:
        """Remove the next item."""
        self._now, _, tenant, item = heappop(self._heap)
        if self._ends[tenant] == self._now:
            del self._ends[tenant]
        return item

    def clear(self) -> None:
        """Remove all items."""
        self._heap.clear()
        self._ends.clear()
