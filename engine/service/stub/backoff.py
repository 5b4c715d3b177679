"""Backoff: how long to wait before the engine process is started again."""

from __future__ import annotations

_FIRST_S = 0.5
_LONGEST_S = 30.0


class Backoff:
    """No delay after a life in which a request finished; then one that doubles with each death."""

    def __init__(self) -> None:
        self._num_useless_lives = 0

    def succeeded(self) -> None:
        """A request has finished: this life was of use."""
        self._num_useless_lives = 0

    def next_delay(self) -> float:
        """Return the seconds to wait after one more death."""
        useless, self._num_useless_lives = self._num_useless_lives, self._num_useless_lives + 1
        return min(_FIRST_S * 2 ** (useless - 1), _LONGEST_S) if useless else 0.0
