"""Deadlines: finds expired requests without a scan of all requests."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush

_SLACK = 64  # entries of finished requests that may stay in the heap


class Deadlines:
    """A heap by time. Entries of finished requests are dropped when they expire, or when they
    outnumber those of unfinished ones.
    """

    def __init__(self, unfinished: Collection[int]) -> None:
        """`unfinished` is a live view of the uids of unfinished requests."""
        self._unfinished = unfinished
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, uid: int, deadline: float) -> None:
        """Let `uid` expire at `deadline`, in seconds of `time.monotonic()`."""
        if len(self._heap) > 2 * len(self._unfinished) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._unfinished]
            heapify(self._heap)
        heappush(self._heap, (deadline, uid))

    def expired(self, now: float) -> list[int]:
        """Remove and return the unfinished requests whose deadline is not after `now`."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            _, uid = heappop(self._heap)
            if uid in self._unfinished:
                late.append(uid)
        return late
