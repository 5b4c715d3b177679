"""TokenizerQueue: requests that wait for the tokenizer, in order and bounded."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from engine.config.engine_config import EngineConfig
from engine.errors import QueueFullError
from engine.service.tensors import Tensors

log = logging.getLogger("trident.tokenizer")

_MOST_SEQS = 256  # `max_num_seqs` where it is not set, on any device
_MAX_BYTES = 2**28  # of the input tensors that wait; the server holds the same bytes once more


class TokenizerQueue:
    """A first-in, first-out queue with one worker thread.

    Without it requests would wait in Triton's own queue before the model, which has no limit.
    """

    def __init__(self, max_requests: int, max_bytes: int = _MAX_BYTES) -> None:
        """At most `max_requests` requests of `max_bytes` together wait; one runs beside them."""
        self.max_requests = max_requests
        self._max_bytes = max_bytes
        self._condition = threading.Condition()
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._num_bytes = 0  # of `_waiting`
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tokenizer", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: EngineConfig) -> TokenizerQueue:
        """Return a queue for as many requests as the engine's queue and its slots take.

        The device decides how many slots there are if the settings do not. It is not known here:
        then room is left for the most.
        """
        return cls(config.max_num_queued_reqs + (config.max_num_seqs or _MOST_SEQS))

    def put(self, answer: Callable[[], None], num_bytes: int) -> None:
        """Have `answer` called in the worker thread; it keeps `num_bytes` until then.

        Where nothing waits any request may, even one that exceeds the limit of bytes by itself.

        Raises:
            QueueFullError: as much is waiting as may wait.
        """
        with self._condition:
            if self._closed:
                raise QueueFullError("the tokenizer takes no more requests: the server is closing")
            if len(self._waiting) >= self.max_requests:
                raise _full(f"{self.max_requests} requests")
            if self._waiting and self._num_bytes + num_bytes > self._max_bytes:
                raise _full(f"{self._max_bytes} bytes")
            self._waiting.append((answer, num_bytes))
            self._num_bytes += num_bytes
            self._condition.notify()

    def close(self) -> None:
        """Answer what waits, then end the worker thread."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while (answer := self._take()) is not None:
            try:
                answer()
            except Exception:  # the thread must go on for the others
                log.exception("a request could not be answered")
            del answer  # and what it keeps, before the next one comes

    def _take(self) -> Callable[[], None] | None:
        with self._condition:
            while not self._waiting:
                if self._closed:
                    return None
                self._condition.wait()
            answer, num_bytes = self._waiting.popleft()
            self._num_bytes -= num_bytes
            return answer


def size_of(tensors: Tensors) -> int:
    """Return how many bytes `tensors` hold; strings count with their text."""
    return sum(
        sum(map(len, array.flat)) if array.dtype.kind == "O" else array.nbytes
        for array in tensors.values()
    )


def _full(limit: str) -> QueueFullError:
    return QueueFullError(
        f"Maximum queue size of {limit} reached (before the tokenizer); try again later"
    )
