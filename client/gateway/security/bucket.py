"""Bucket: how much of a limit per minute is left."""

from __future__ import annotations

import time
from collections.abc import Callable

_MINUTE_S = 60.0
_ROUNDING_S = 1e-6  # of the times: who has waited as long as was said is not sent away again


class Bucket:
    """A token bucket that holds a minute's use, and is full at the beginning.

    It is kept as the time at which it will be full again: the generic cell rate algorithm (ITU-T
    I.371).
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._full_at = clock()

    def take(self, amount: int) -> float:
        """Take `amount` out if it is there, and return 0; else return the seconds until it is.

        An amount of 0 is there as long as nothing is owed.
        """
        full_at = self._after(amount)
        wait = full_at - self._clock() - _MINUTE_S
        if wait > _ROUNDING_S:
            return wait
        self._full_at = full_at
        return 0.0

    def charge(self, amount: int) -> None:
        """Take `amount` out, owing what is not there."""
        self._full_at = self._after(amount)

    def _after(self, amount: int) -> float:
        return max(self._full_at, self._clock()) + amount * _MINUTE_S / self.per_minute
