"""RetryPolicy: how often, and after which pauses, a request is tried again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from client.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with jitter, for errors that may be gone a moment later.

    Those are the `UnavailableError`s: no server, a lost connection, an engine process that is being
    restarted, a full queue. A request is tried again only as long as nothing of its answer has
    arrived, and only within its `timeout`.

    Attributes:
        attempts: tries in all; 1 never tries again.
        first_delay_s: the pause before the second try, in seconds.
        factor: each further pause is that much longer, at least 1.
        max_delay_s: no pause is longer, in seconds.
        jitter: random share of each pause, 0 to 1, so that the clients of a server that was away do
            not retry all at once.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    attempts: int = 4
    first_delay_s: float = 0.5
    factor: float = 3.0
    max_delay_s: float = 10.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        ranges = {
            "attempts": (1, 1000),
            "first_delay_s": (0, 3600),
            "factor": (1, 1000),
            "max_delay_s": (0, 3600),
            "jitter": (0, 1),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigurationError(
                    f"{name} must be between {low} and {high} (got {value})", param="retry"
                )

    def delays(self, chance: Callable[[], float] = random.random) -> Iterator[float]:
        """Yield the pauses in seconds, one for each try after the first.

        Args:
            chance: returns numbers in [0, 1); 0 gives the longest pause.
        """
        longest = self.first_delay_s
        for _ in range(self.attempts - 1):
            longest = min(longest, self.max_delay_s)
            yield longest * (1 - self.jitter * chance())
            longest *= self.factor


DEFAULT_RETRY = RetryPolicy()
