"""Timeout: how long a request may take, in all and between two pieces of its answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from client.errors import ConfigurationError, InvalidRequestError


@dataclass(frozen=True, slots=True)
class Timeout:
    """Limits of one request in seconds; None: no limit.

    The time to connect is limited by the client's `connect_timeout`.

    Attributes:
        total: for everything: queueing, the answer, further attempts and the pauses before them.
            It is sent to the server, which drops the request when it has passed.
        read: from sending to the first piece of the answer, and from one piece to the next. Time
            in which the caller does not ask for a piece does not count.

    Raises:
        ConfigurationError: a limit is no number above 0.
    """

    total: float | None = None
    read: float | None = None

    def __post_init__(self) -> None:
        for name in ("total", "read"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise ConfigurationError(
                    f"{name} must be above 0 s (got {value!r})", param="timeout"
                )

    @classmethod
    def of(cls, timeout: float | Timeout | None) -> Timeout:
        """Return `timeout` itself, or one with that total."""
        return timeout if isinstance(timeout, Timeout) else cls(total=timeout)


def limits(timeout: float | Timeout | None, default: Timeout) -> tuple[float, float]:
    """Return the total and the read limit of a request in seconds; infinite for none.

    Args:
        timeout: a number is the total, with the read limit of `default`; None is `default`.

    Raises:
        InvalidRequestError: it is no number.
    """
    if isinstance(timeout, Timeout):
        default, timeout = timeout, timeout.total
    elif timeout is None:
        timeout = default.total
    elif not _is_number(timeout):
        raise InvalidRequestError(f"must be a number of seconds (got {timeout!r})", param="timeout")
    return _or_infinite(timeout), _or_infinite(default.read)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)


def _or_infinite(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
