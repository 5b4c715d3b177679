"""Senders: threads that deliver responses, each request in its turn and at a bounded rate."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable

from engine.errors import TridentError
from engine.service.stub.pace import Pace, ServerProcesses
from engine.service.stub.stream import RequestStream
from engine.service.stub.turn_queue import TurnQueue

log = logging.getLogger("trident.delivery")

_NUM_SENDERS = 2  # more take turns with Python's lock, and carry no more

_TICKS_PER_INTERVAL = 8


class Senders:
    """A few threads that deliver responses.

    A slow consumer delays no other request: its outputs meanwhile are coalesced into one response.
    The first and the last response of a request are sent at once. Those between keep the interval
    of `pace`, which adds no delay if steps take longer.

    Attributes:
        pace: how often a stream is answered.
    """

    def __init__(self, on_answered: Callable[[RequestStream], None]) -> None:
        """`on_answered` is called after a request's last response, in a sender's thread."""
        self._on_answered = on_answered
        num_cores = len(os.sched_getaffinity(0))
        self.pace = Pace(ServerProcesses().times, num_cores=num_cores)
        self._begun: set[RequestStream] = set()  # answered at least once, and not for the last time
        self._turns = TurnQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"sender-{i}", daemon=True)
            for i in range(_NUM_SENDERS)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, streams: Iterable[RequestStream]) -> None:
        """Queue `streams` for delivery; returns at once."""
        self._turns.put((each, 0.0 if each.is_urgent else each.next_due) for each in streams)

    def close(self) -> None:
        """Deliver what was put before, then end the threads."""
        self._turns.close()
        for thread in self._threads:
            thread.join(timeout=5)

    def _run(self) -> None:
        while streams := self._turns.take():
            for stream in streams:
                stream.next_due = self._next_due()
                try:
                    self._deliver(stream)
                except Exception:  # not of the sink: this thread must go on for the others
                    log.exception("request %d: its end could not be handled", stream.uid)
            self._turns.done(streams)

    def _deliver(self, stream: RequestStream) -> None:
        if stream.answered:
            return
        self._begun.add(stream)
        try:
            stream.deliver()
        except Exception:
            log.exception("request %d: its response could not be sent", stream.uid)
            stream.abandon(TridentError("internal error"))
        self.pace.count_response()
        if stream.answered:
            self._begun.discard(stream)
            self._on_answered(stream)

    def _next_due(self) -> float:
        """Return when the next response of a stream is due, whose turn is now.

        Rounded, so that several streams are due together: a thread of each stage is then woken for
        several responses.
        """
        interval_s = self.pace.interval_s(len(self._begun))
        tick_s = interval_s / _TICKS_PER_INTERVAL
        return round((time.monotonic() + interval_s) / tick_s) * tick_s
