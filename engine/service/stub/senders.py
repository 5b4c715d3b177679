"""Senders: threads that deliver responses, each request in its turn and at a bounded rate."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable

from engine.errors import TridentError
from engine.service.stub.stream import RequestStream

log = logging.getLogger("trident.delivery")

NUM_SENDERS = 4

# A response costs about half a millisecond of processor time, over the server, the stages and the
# client, however many tokens it carries. At this rate they take a quarter of each core; what a
# faster engine produces meanwhile is coalesced. `trident bench stages` measures it.
_RESPONSES_PER_CORE_S = 500
_MOST_RESPONSES_S = 4000  # that the one detokenizer keeps up with
_LEAST_INTERVAL_S = 0.004  # of one stream: 250 responses per second look as smooth as more


class TurnQueue:
    """Streams that wait for a sender, by the time that their next response is due.

    A stream is here once, however often it is put, and never with two senders.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._heap: list[tuple[float, int, RequestStream]] = []
        self._due: dict[RequestStream, float] = {}  # of what waits; other heap entries are stale
        self._busy: dict[RequestStream, float] = {}  # with a sender; due again then, or never
        self._order = itertools.count()
        self._closed = False

    def put(self, stream: RequestStream, due: float) -> None:
        """Have `stream` taken at `time.monotonic()` second `due`, or earlier if it was put so."""
        with self._condition:
            if stream in self._busy:
                self._busy[stream] = min(due, self._busy[stream])
            elif due < self._due.get(stream, math.inf):
                self._push(stream, due)

    def take(self) -> RequestStream | None:
        """Wait for the next stream that is due; None once closed and empty.

        The caller has it until `done`.
        """
        with self._condition:
            while True:
                self._drop_stale()
                if self._heap:
                    wait_s = self._heap[0][0] - time.monotonic()
                    if wait_s <= 0 or self._closed:
                        return self._pop()
                    self._condition.wait(wait_s)
                elif self._closed:
                    return None
                else:
                    self._condition.wait()

    def done(self, stream: RequestStream) -> None:
        """Give `stream` back; it waits again if it was put meanwhile."""
        with self._condition:
            due = self._busy.pop(stream)
            if due < math.inf:
                self._push(stream, due)

    def close(self) -> None:
        """Let `take` return what is left without waiting, and then None."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _push(self, stream: RequestStream, due: float) -> None:
        self._due[stream] = due
        heapq.heappush(self._heap, (due, next(self._order), stream))
        self._condition.notify()

    def _pop(self) -> RequestStream:
        stream = heapq.heappop(self._heap)[2]
        del self._due[stream]
        self._busy[stream] = math.inf
        if self._heap:
            self._condition.notify()  # for another sender
        return stream

    def _drop_stale(self) -> None:
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)


class Senders:
    """A few threads that deliver responses.

    A slow consumer delays no other request: its outputs meanwhile are coalesced into one response.
    The first and the last response of a request are sent at once. Those between keep an interval
    that grows with the number of streams, so that responses never take the processor from the
    engine; it adds no delay if steps take longer.
    """

    def __init__(self, on_answered: Callable[[RequestStream], None]) -> None:
        """`on_answered` is called after a request's last response, in a sender's thread."""
        self._on_answered = on_answered
        num_cores = len(os.sched_getaffinity(0))
        self._responses_per_s = min(_RESPONSES_PER_CORE_S * num_cores, _MOST_RESPONSES_S)
        self._begun: set[RequestStream] = set()  # answered at least once, and not for the last time
        self._turns = TurnQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"sender-{i}", daemon=True)
            for i in range(NUM_SENDERS)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, stream: RequestStream) -> None:
        """Queue `stream` for delivery; returns at once."""
        self._turns.put(stream, 0.0 if stream.is_urgent else stream.next_due)

    def close(self) -> None:
        """Deliver what was put before, then end the threads."""
        self._turns.close()
        for thread in self._threads:
            thread.join(timeout=5)

    def _run(self) -> None:
        while (stream := self._turns.take()) is not None:
            stream.next_due = time.monotonic() + self._interval_s()
            try:
                self._deliver(stream)
            except Exception:  # not of the sink: this thread must go on for the others
                log.exception("request %d: its end could not be handled", stream.uid)
            self._turns.done(stream)

    def _deliver(self, stream: RequestStream) -> None:
        if stream.answered:
            return
        self._begun.add(stream)
        try:
            stream.deliver()
        except Exception:
            log.exception("request %d: its response could not be sent", stream.uid)
            stream.abandon(TridentError("internal error"))
        if stream.answered:
            self._begun.discard(stream)
            self._on_answered(stream)

    def _interval_s(self) -> float:
        return max(_LEAST_INTERVAL_S, len(self._begun) / self._responses_per_s)
