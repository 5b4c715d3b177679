"""Suspects: requests that were in flight when the engine process crashed."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from engine.errors import SuspectRequestError

_MAX_DEATHS = 2
_MEMORY_S = 600.0  # then a request may try again: it may have been a bystander both times
_MAX_REMEMBERED = 16_384  # fingerprints; the oldest are forgotten first


class Suspects:
    """Counts crashes per request, by `NewRequest.fingerprint`, because clients retry.

    A request that was in flight at two of them in a row is refused for a while. One that finishes
    in between is cleared: it was not the cause. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # how many, the last
        self._lock = threading.Lock()

    def check(self, fingerprint: bytes) -> None:
        """Raise `SuspectRequestError` if this request must not reach the engine again."""
        with self._lock:
            self._forget()
            deaths, _ = self._deaths.get(fingerprint, (0, 0.0))
        if deaths >= _MAX_DEATHS:
            raise SuspectRequestError(
                f"refused: the engine died each of the {deaths} times that it worked on this "
                "request"
            )

    def blame(self, fingerprints: Iterable[bytes]) -> None:
        """Count a death against each request that was in flight."""
        with self._lock:
            for fingerprint in set(fingerprints):
                deaths, _ = self._deaths.pop(fingerprint, (0, 0.0))
                self._deaths[fingerprint] = (deaths + 1, self._clock())
            self._forget()

    def clear(self, fingerprint: bytes) -> None:
        """Forget the crashes of a request, because it has finished."""
        with self._lock:
            self._deaths.pop(fingerprint, None)

    def _forget(self) -> None:
        oldest = self._clock() - _MEMORY_S
        while self._deaths and (
            len(self._deaths) > _MAX_REMEMBERED or next(iter(self._deaths.values()))[1] < oldest
        ):
            self._deaths.popitem(last=False)
