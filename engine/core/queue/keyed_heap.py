"""KeyedHeap: items by a key that may change, of which the least is found in O(log n)."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Any)  # ordered: a number, or a tuple of some

_SLACK = 64  # stale entries that may stay in the heap


class KeyedHeap(Generic[K]):
    """A heap that holds each name once, with the key that it got last.

    A changed key is one more entry of the heap; stale entries are dropped when they are the least,
    or when they outnumber the others.
    """

    def __init__(self) -> None:
        self._keys: dict[str, K] = {}
        self._heap: list[tuple[K, str]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def set(self, name: str, key: K) -> None:
        """Add `name`, or change its key."""
        if self._keys.get(name) == key:
            return
        self._keys[name] = key
        heappush(self._heap, (key, name))
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [(key, name) for name, key in self._keys.items()]
            heapify(self._heap)

    def discard(self, name: str) -> None:
        """Remove `name`, if it is here."""
        self._keys.pop(name, None)

    def first(self) -> str | None:
        """Return the name with the least key; None if there is none."""
        heap, keys = self._heap, self._keys
        while heap:
            key, name = heap[0]
            if keys.get(name) == key:
                return name
            heappop(heap)
        return None
