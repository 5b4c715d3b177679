"""CircuitBreaker: leaves a server alone that has failed, and tries it again later."""

import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half_open"]

FAILURES = 3
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 4.0


class CircuitBreaker:
    """Closed: requests go through. Open: none do. Half open: one trial decides.

    It opens after `FAILURES` failures in a row, or at once by `trip`; each trial that fails doubles
    the pause before the next.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = FIRST_PAUSE_S
        self._trial_at: float | None = None  # None: closed

    @property
    def state(self) -> State:
        """What becomes of a request now."""
        if self._trial_at is None:
            return "closed"
        return "open" if self._clock() < self._trial_at else "half_open"

    def take_trial(self) -> bool:
        """Tell whether the caller is to try the server; of many callers one, if it is half open.

        A trial of which nothing more is heard counts for nothing: after the pause comes another.
        """
        if self.state == "half_open":
            self._trial_at = self._clock() + self._pause
            return True
        return self.state == "closed"

    def succeeded(self) -> None:
        """Record an answer of the server."""
        self._failures, self._pause, self._trial_at = 0, FIRST_PAUSE_S, None

    def failed(self) -> None:
        """Record that the server did not answer."""
        self._failures += 1
        if self._trial_at is None and self._failures >= FAILURES:
            self.trip()

    def trip(self) -> None:
        """Open, or stay open for twice as long."""
        if self._trial_at is not None:
            self._pause = min(2 * self._pause, MAX_PAUSE_S)
        self._trial_at = self._clock() + self._pause
