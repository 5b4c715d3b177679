"""RestartDelay: how long to wait before a process that has died is started again."""

_FIRST_S = 0.5
_MAX_S = 30.0


class RestartDelay:
    """Nothing after a process that finished a request; after others a delay that doubles."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def succeeded(self) -> None:
        """Record that the process has finished a request."""
        self._next_s = 0.0

    def next(self) -> float:
        """Record the death of the process; return the seconds until its next start."""
        seconds, self._next_s = self._next_s, min(2 * self._next_s or _FIRST_S, _MAX_S)
        return seconds
