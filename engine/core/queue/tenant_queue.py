"""TenantQueue: one queue of waiting sequences, kept for each tenant apart."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterator
from heapq import merge
from itertools import islice

from engine.core.queue.rank import Rank
from engine.core.request import Request


class TenantQueue:
    """Waiting sequences in order of rank, smaller first, of each tenant and over all of them."""

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        """Order by `rank`; ranks are unique and do not change while a sequence waits."""
        self._rank = rank
        self._by_tenant: dict[str, list[Request]] = {}  # none is empty

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def __bool__(self) -> bool:
        return bool(self._by_tenant)

    def __iter__(self) -> Iterator[Request]:
        """Yield the sequences of all tenants by rank."""
        return merge(*self._by_tenant.values(), key=self._rank)

    def __reversed__(self) -> Iterator[Request]:
        """Yield the sequences of all tenants, the last in rank first."""
        return merge(*map(reversed, self._by_tenant.values()), key=self._rank, reverse=True)

    def firsts(self, passed_over: Container[Request]) -> Iterator[Request]:
        """Yield the first sequence of each tenant that is not in `passed_over`."""
        for queue in self._by_tenant.values():
            yield from islice((each for each in queue if each not in passed_over), 1)

    def of(self, tenant: str) -> list[Request]:
        """Return the sequences of one tenant, by rank; they are not to be changed."""
        return self._by_tenant.get(tenant, [])

    def push(self, request: Request) -> None:
        """Add `request`. Its rank must not change until it is removed."""
        insort(self._by_tenant.setdefault(request.tenant, []), request, key=self._rank)

    def discard(self, request: Request) -> bool:
        """Remove `request`; return whether it was here."""
        queue = self.of(request.tenant)
        place = bisect_left(queue, self._rank(request), key=self._rank)
        if place == len(queue) or queue[place] is not request:
            return False
        del queue[place]
        if not queue:
            del self._by_tenant[request.tenant]
        return True

    def pop_last(self) -> Request:
        """Remove the last sequence in rank, and return it."""
        last = next(reversed(self))
        self.discard(last)
        return last

    def check_integrity(self) -> None:
        """Assert that each sequence is in its tenant's part, in order."""
        for tenant, queue in self._by_tenant.items():
            assert queue == sorted(queue, key=self._rank)
            assert queue
            assert all(request.tenant == tenant for request in queue)
