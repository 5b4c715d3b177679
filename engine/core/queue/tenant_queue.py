"""TenantQueue: waiting sequences by rank, over all tenants and of each."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from engine.core.queue.rank import Rank
from engine.core.request import Request


class TenantQueue:
    """Waiting sequences in order of rank, smaller first: found, added and removed in O(log n)."""

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        """Order by `rank`; ranks are unique and do not change while a sequence waits."""
        self._rank = rank
        self._all: list[Request] = []
        self._by_tenant: dict[str, list[Request]] = {}  # none is empty

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        """Yield the sequences of all tenants by rank."""
        return iter(self._all)

    def __reversed__(self) -> Iterator[Request]:
        """Yield the sequences of all tenants, the last in rank first."""
        return reversed(self._all)

    @property
    def first(self) -> Request | None:
        """The first sequence in rank, None if the queue is empty."""
        return self._all[0] if self._all else None

    def first_of(self, tenant: str) -> Request | None:
        """Return the first sequence of one tenant, None if it has none."""
        queue = self._by_tenant.get(tenant)
        return queue[0] if queue else None

    def of(self, tenant: str) -> list[Request]:
        """Return the sequences of one tenant, by rank; they are not to be changed."""
        return self._by_tenant.get(tenant, [])

    def push(self, request: Request) -> None:
        """Add `request`. Its rank must not change until it is removed."""
        insort(self._all, request, key=self._rank)
        insort(self._by_tenant.setdefault(request.tenant, []), request, key=self._rank)

    def discard(self, request: Request) -> bool:
        """Remove `request`; return whether it was here."""
        queue = self.of(request.tenant)
        if not self._remove(queue, request):
            return False
        if not queue:
            del self._by_tenant[request.tenant]
        return self._remove(self._all, request)

    def _remove(self, queue: list[Request], request: Request) -> bool:
        position = bisect_left(queue, self._rank(request), key=self._rank)
        if position == len(queue) or queue[position] is not request:
            return False
        del queue[position]
        return True

    def check_integrity(self) -> None:
        """Assert that each sequence is in its tenant's part, and all are in order."""
        assert self._all == sorted(self._all, key=self._rank)
        for tenant, queue in self._by_tenant.items():
            assert queue
            assert queue == [each for each in self._all if each.tenant == tenant]
        assert len(self._all) == sum(map(len, self._by_tenant.values()))
