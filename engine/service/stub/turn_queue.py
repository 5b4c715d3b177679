"""TurnQueue: streams that wait for a sender, by the time that their next response is due."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Iterable, Sequence

from engine.service.stub.stream import RequestStream

_BATCH = 8  # streams that one sender takes at once


class TurnQueue:
    """A queue of streams. A stream is here once, however often it is put, and with one sender.

    Of the threads that wait in `take` one waits for the next due time; it alone is woken when an
    earlier one comes. Streams that are due together are taken together.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        self._lock = lock
        self._next_due = threading.Condition(lock)  # the one thread that waits for a time
        self._work = threading.Condition(lock)  # the others
        self._waking_at: float | None = None  # when that one thread wakes; None: there is none
        self._heap: list[tuple[float, int, RequestStream]] = []
        self._due: dict[RequestStream, float] = {}  # of what waits; other heap entries are stale
        self._busy: dict[RequestStream, float] = {}  # with a sender; due again then, or never
        self._order = itertools.count()
        self._closed = False

    def put(self, streams: Iterable[tuple[RequestStream, float]]) -> None:
        """Have each stream taken at its `time.monotonic()` second, or earlier if it was put so."""
        with self._lock:
            for stream, due in streams:
                if stream in self._busy:
                    self._busy[stream] = min(due, self._busy[stream])
                elif due < self._due.get(stream, math.inf):
                    self._push(stream, due)
            self._wake()

    def take(self) -> Sequence[RequestStream]:
        """Wait for streams that are due and return a few of them; none once closed and empty.

        The caller has them until `done`.
        """
        with self._lock:
            while True:
                self._drop_stale()
                now = math.inf if self._closed else time.monotonic()
                if self._heap and self._heap[0][0] <= now:
                    return self._pop(now)
                if self._closed:
                    return ()
                if self._waking_at is not None:
                    self._work.wait()
                    continue
                due = self._heap[0][0] if self._heap else math.inf
                self._waking_at = due
                self._next_due.wait(None if due == math.inf else due - now)
                self._waking_at = None

    def done(self, streams: Iterable[RequestStream]) -> None:
        """Give streams back; those that were put meanwhile wait again."""
        with self._lock:
            for stream in streams:
                due = self._busy.pop(stream)
                if due < math.inf:
                    self._push(stream, due)
            self._wake()

    def close(self) -> None:
        """Let `take` return what is left without waiting, and then nothing."""
        with self._lock:
            self._closed = True
            self._next_due.notify_all()
            self._work.notify_all()

    def _push(self, stream: RequestStream, due: float) -> None:
        self._due[stream] = due
        heapq.heappush(self._heap, (due, next(self._order), stream))

    def _pop(self, now: float) -> list[RequestStream]:
        batch: list[RequestStream] = []
        while self._heap and self._heap[0][0] <= now and len(batch) < _BATCH:
            stream = heapq.heappop(self._heap)[2]
            del self._due[stream]
            self._busy[stream] = math.inf
            batch.append(stream)
            self._drop_stale()
        self._wake()
        return batch

    def _wake(self) -> None:
        """See that a thread wakes in time for the stream that is due first."""
        if not self._heap:
            return
        if self._waking_at is None:
            self._work.notify()
        elif self._heap[0][0] < self._waking_at:
            self._next_due.notify()

    def _drop_stale(self) -> None:
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
