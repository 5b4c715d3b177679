"""Pace: how often a stream gets a response, by what a response costs the server on this machine."""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

# Share of the cores that responses may take. They begin with the most, so that the first users are
# answered as later ones are, and get what is idle but for a rest. The least they have in any case.
_LEAST_SHARE, _MOST_SHARE = 0.25, 0.9
_REST = 0.1
# The same where the engine computes on these cores: what responses take, it loses.
_SHARE_BESIDE_CPU_ENGINE = 1 / 16

_LEAST_INTERVAL_S = 0.004  # of one stream: 250 responses per second look as smooth as more
_MOST_INTERVAL_S = 1.0  # a reader takes a longer pause for a fault
_MEASURING_S = 0.5
_LEAST_RESPONSES = 100  # that a measurement needs: below, the processes' other work counts
_GUESS_S = 0.5e-3  # cost of a response before it has been measured
_NUM_MEASUREMENTS = 8  # of the last ones the least holds: new requests cost their stages too
_BOUNDS_S = (0.05e-3, 5e-3)


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


class Pace:
    """The interval between two responses of a stream, when many streams share the stages.

    What the engine produces meanwhile goes into one response: under load a response carries more
    tokens. Responses get the cores that are idle beside the engine, and a quarter of them where
    none is; a sixteenth where the engine computes on them. A token waits for 1 s at most, then for
    the turn of its stream: `Window` bounds how many responses are under way. Thread-safe.

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
        self._share = min(max(self._share + idle - _REST, _LEAST_SHARE), _MOST_SHARE)


def _seconds(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def _idle_seconds() -> float:
    cores = os.sched_getaffinity(0)
    times = psutil.cpu_times(percpu=True)
    return sum(each.idle for core, each in enumerate(times) if core in cores)
