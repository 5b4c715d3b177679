"""Delivery: threads that deliver responses, each request in its turn and at a bounded rate."""

from __future__ import annotations

import collections
import heapq
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from engine.errors import TridentError
from engine.service.stub.stream import RequestStream

log = logging.getLogger("trident.delivery")

_NUM_SENDERS = 2  # more take turns with Python's lock, and carry no more

_TICKS_PER_INTERVAL = 8

# Share of the cores that responses may take. They begin with the most, so that the first users are
# answered as later ones are, and get what is idle but for a rest. The least they have in any case.
_LEAST_SHARE, _MOST_SHARE = 0.25, 0.9
_IDLE_RESERVE = 0.1
# The same where the engine computes on these cores: what responses take, it loses.
_SHARE_BESIDE_CPU_ENGINE = 1 / 16

_LEAST_INTERVAL_S = 0.004  # of one stream: 250 responses per second look as smooth as more
_MOST_INTERVAL_S = 1.0  # a reader takes a longer pause for a fault
_MEASURING_S = 0.5
_LEAST_RESPONSES = 100  # that a measurement needs: below, the processes' other work counts
_GUESS_S = 0.5e-3  # cost of a response before it has been measured
_NUM_MEASUREMENTS = 8  # of the last ones the least holds: new requests cost their stages too
_BOUNDS_S = (0.05e-3, 5e-3)

_MAX_STREAMS_AT_ONCE = 8  # streams that one sender takes at once

_WINDOW_SIZE = 64  # enough that the stage never waits for a message; it takes them in about 20 ms
_ACK_EVERY = 16  # acknowledge every 16th message
_LOST_S = 0.1  # after so long without news, what is under way counts as lost


class AckWindow:
    """Holds a message back while as many as fit are under way before the detokenizer.

    So no queue grows in Triton, which has no limit there, and a response has the tokens that came
    while it waited for its turn. Messages arrive in order; so what Triton dropped on the way
    is no longer under way when a later one has arrived. Thread-safe.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_sent = self._num_arrived = 0

    def enter(self) -> int:
        """Wait until there is room; return the sequence number to acknowledge, or 0 for none."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, _LOST_S):
                self._num_arrived = self._num_sent
            self._num_sent += 1
            return 0 if self._num_sent % _ACK_EVERY else self._num_sent

    def arrived(self, number: int) -> None:
        """Record that the message with this sequence number has arrived."""
        with self._changed:
            self._num_arrived = max(self._num_arrived, min(number, self._num_sent))
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._num_sent - self._num_arrived < _WINDOW_SIZE


class DeliveryQueue:
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
        while self._heap and self._heap[0][0] <= now and len(batch) < _MAX_STREAMS_AT_ONCE:
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


@dataclass(frozen=True)
class StageTimes:
    """CPU seconds so far.

    Attributes:
        server: of tritonserver itself.
        stubs: of its models, by process id.
        idle: of the cores that this process may use.
    """

    server: float
    stubs: Mapping[int, float]
    idle: float


class ServerProcesses:
    """The server, which has started this stub, and the stubs of its models."""

    def __init__(self) -> None:
        """Look for no other process yet: they may not have been started."""
        self._server = psutil.Process(os.getppid())
        self._stubs: list[psutil.Process] = []

    def times(self) -> StageTimes:
        """Return the CPU times so far; none of stubs if one has just ended."""
        try:
            if not self._stubs:
                self._stubs = self._server.children()
            stubs = {each.pid: _seconds(each) for each in self._stubs}
            return StageTimes(_seconds(self._server), stubs, _idle_seconds())
        except psutil.Error:  # a model has been loaded again, or all ends
            self._stubs = []
            return StageTimes(0.0, {}, 0.0)


class RateController:
    """The interval between two responses of a stream, when many streams share the stages.

    What the engine produces meanwhile goes into one response: under load a response carries more
    tokens. Responses get the cores that are idle beside the engine, and a quarter of them where
    none is; a sixteenth where the engine computes on them. A token waits for 1 s at most, then for
    the turn of its stream: `AckWindow` bounds how many responses are under way. Thread-safe.

    Attributes:
        beside_cpu_engine: whether the engine computes on the same cores.
    """

    def __init__(
        self,
        times: Callable[[], StageTimes],
        *,
        num_cores: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measure the cost of responses from the CPU `times`."""
        self.beside_cpu_engine = False
        self._share = _MOST_SHARE
        self._times = times
        self._num_cores = num_cores
        self._clock = clock
        self._lock = threading.Lock()
        self._num_responses = 0  # since the measurement began
        self._began = clock()
        self._before = StageTimes(0.0, {}, 0.0)
        # Of a response, in all processes together.
        self._costs = collections.deque([_GUESS_S], maxlen=_NUM_MEASUREMENTS)

    def count_response(self) -> None:
        """Count a response that has been sent, and measure once in a while."""
        with self._lock:
            self._num_responses += 1
            now = self._clock()
            if now - self._began < _MEASURING_S:
                return
            num_responses, self._num_responses = self._num_responses, 0
            before, self._before = self._before, self._times()
            seconds, self._began = now - self._began, now
            if num_responses >= _LEAST_RESPONSES:
                self._learn(before, self._before, num_responses, seconds)

    def interval_s(self, num_streams: int) -> float:
        """Return the seconds between two responses of each of `num_streams`."""
        share = _SHARE_BESIDE_CPU_ENGINE if self.beside_cpu_engine else self._share
        interval_s = num_streams * min(self._costs) / (share * self._num_cores)
        return min(max(interval_s, _LEAST_INTERVAL_S), _MOST_INTERVAL_S)

    def _learn(
        self, before: StageTimes, after: StageTimes, num_responses: int, seconds: float
    ) -> None:
        if before.stubs.keys() != after.stubs.keys() or not after.stubs:
            return
        used = after.server - before.server
        used += sum(after.stubs.values()) - sum(before.stubs.values())
        low, high = _BOUNDS_S
        self._costs.append(min(max(used / num_responses, low), high))
        idle = (after.idle - before.idle) / (seconds * self._num_cores)
        self._share = min(max(self._share + idle - _IDLE_RESERVE, _LEAST_SHARE), _MOST_SHARE)


def _seconds(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def _idle_seconds() -> float:
    cores = os.sched_getaffinity(0)
    times = psutil.cpu_times(percpu=True)
    return sum(each.idle for core, each in enumerate(times) if core in cores)


class Delivery:
    """A few threads that deliver responses.

    A slow consumer delays no other request: its outputs meanwhile are coalesced into one response.
    The first and the last response of a request are sent at once. Those between keep the interval
    of `rate`, which adds no delay if steps take longer.

    Attributes:
        rate: how often a stream is answered.
    """

    def __init__(self, on_answered: Callable[[RequestStream], None]) -> None:
        """`on_answered` is called after a request's last response, in a sender's thread."""
        self._on_answered = on_answered
        num_cores = len(os.sched_getaffinity(0))
        self.rate = RateController(ServerProcesses().times, num_cores=num_cores)
        self._begun: set[RequestStream] = set()  # answered at least once, and not for the last time
        self._turns = DeliveryQueue()
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
        self.rate.count_response()
        if stream.answered:
            self._begun.discard(stream)
            self._on_answered(stream)

    def _next_due(self) -> float:
        """Return when the next response of a stream is due, whose turn is now.

        Rounded, so that several streams are due together: a thread of each stage is then woken for
        several responses.
        """
        interval_s = self.rate.interval_s(len(self._begun))
        tick_s = interval_s / _TICKS_PER_INTERVAL
        return round((time.monotonic() + interval_s) / tick_s) * tick_s
