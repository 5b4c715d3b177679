"""ReadTimer: a limit for the wait on one message of a stream, which gRPC itself does not have."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")


class ReadTimer:
    """Cancels a stream that is silent while it is read. A thread in the block, if there is a limit.

    Args:
        seconds: how long one read may take; infinite for no limit.
        cancel: ends the stream, so that the read returns.

    Attributes:
        expired: whether `cancel` was called.
    """

    def __init__(self, seconds: float, cancel: Callable[[], object]) -> None:
        self.expired = False
        self._seconds = seconds
        self._cancel = cancel
        self._changed = threading.Condition()
        self._due: float | None = math.inf  # None: the block has ended
        self._thread = threading.Thread(target=self._watch, name="trident-read-timer", daemon=True)

    def next(self, stream: Iterator[T]) -> T | None:
        """Return the next message of `stream`, or None at its end."""
        if self._seconds == math.inf:
            return next(stream, None)
        self._set(time.monotonic() + self._seconds)
        try:
            return next(stream, None)
        finally:
            self._set(math.inf)

    def __enter__(self) -> Self:
        if self._seconds != math.inf:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._set(None)

    def _set(self, due: float | None) -> None:
        with self._changed:
            self._due = due
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while self._due is not None:
                left = self._due - time.monotonic()
                if left <= 0:
                    self.expired = True
                    self._cancel()
                    return
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
