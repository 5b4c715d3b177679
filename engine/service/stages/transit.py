"""TransitMeter: how long messages take from the engine stub to the detokenizer."""

from __future__ import annotations

_WINDOW_S = 0.1


class TransitMeter:
    """Finds the least transit time in each window of 0.1 s.

    The least, because single messages may be late for many reasons; if all are, they wait in a
    queue that does not empty.
    """

    def __init__(self) -> None:
        self._least_s = 0.0
        self._until = 0.0  # the window's end, in `time.monotonic()` seconds

    def add(self, sent_at: float, now: float) -> float | None:
        """Count a message; return the least time of the window before if it is over.

        A window ends with the first message after its end.
        """
        transit_s = max(now - sent_at, 0.0)
        if now < self._until:
            self._least_s = min(self._least_s, transit_s)
            return None
        least_s, is_first = self._least_s, self._until == 0.0
        self._least_s, self._until = transit_s, now + _WINDOW_S
        return None if is_first else least_s
