"""Bucket: how much of a limit per minute is left."""

from __future__ import annotations

import time
from collections.abc import Callable

from client.gateway.security.ledger import Ledger

_MINUTE_S = 60.0
_ROUNDING_S = 1e-6  # of the times: who has waited as long as was said is not sent away again


class Bucket:
    """A token bucket that holds a minute's use, and is full at the beginning.

    It is kept as the time at which it will be full again: the generic cell rate algorithm (ITU-T
    I.371).
    """

    def __init__(
        self,
        per_minute: int,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
        place: int = 0,
    ) -> None:
        """Make a bucket.

        Args:
            per_minute: what it holds.
            clock: returns seconds; the same for all who share the ledger.
            ledger: has that time at `place`; None is one of its own.
        """
        self.per_minute = per_minute
        self._clock = clock
        self._ledger = ledger or Ledger(1)
        self._place = place

    def take(self, amount: int) -> float:
        """Take `amount` out if it is there, and return 0; else return the seconds until it is.

        An amount of 0 is there as long as nothing is owed.
        """
        with self._ledger as times:
            now = self._clock()
            full_at = self._after(amount, times[self._place], now)
            wait = full_at - now - _MINUTE_S
            if wait > _ROUNDING_S:
                return wait
            times[self._place] = full_at
            return 0.0

    def charge(self, amount: int) -> None:
        """Take `amount` out, owing what is not there."""
        with self._ledger as times:
            times[self._place] = self._after(amount, times[self._place], self._clock())

    def _after(self, amount: int, full_at: float, now: float) -> float:
        return max(full_at, now) + amount * _MINUTE_S / self.per_minute
