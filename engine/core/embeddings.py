"""EmbeddingReader: takes the last hidden state of a prompt from the step that ends it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from engine.core.request import Request
from engine.core.schedule import Float32s, Samples, Schedule

_LEAST_NORM = 1e-12  # as in torch's `normalize`


class EmbeddingReader:
    """Has the hidden states downloaded that requests with `return_embedding` are about."""

    def __init__(self) -> None:
        """Begin without sequences and steps."""
        self._running: dict[int, Request] = {}  # by slot
        self._in_flight: deque[list[Request]] = deque()  # of each step, whose rows it downloads

    def add(self, request: Request) -> None:
        """Note that `request` has got a slot."""
        if request.sampling_params.return_embedding:
            assert request.slot is not None
            self._running[request.slot] = request

    def launch(self, schedule: Schedule) -> Schedule:
        """Return the next step with the rows to download, and note that it will be read."""
        taken: list[Request] = []
        self._in_flight.append(taken)
        if self._running:  # those that have given up their slots are forgotten
            self._running = {s: each for s, each in self._running.items() if each.slot == s}
        if not self._running:
            return schedule
        wanted = schedule.wants_token & np.isin(schedule.slots, list(self._running))
        rows = np.flatnonzero(wanted).astype(np.int32)
        if not len(rows):
            return schedule
        taken += [self._running[slot] for slot in schedule.slots[rows].tolist()]
        return replace(schedule, embedded=rows)

    def cancel(self) -> None:
        """Forget the newest step, whose sequences must be aborted."""
        self._in_flight.pop()

    def read(self, samples: Samples) -> None:
        """Take what the oldest step in flight has downloaded, also for a preempted sequence."""
        for row, request in enumerate(self._in_flight.popleft()):
            assert samples.hidden is not None
            request.output.embedding = _normalized(samples.hidden[row])


def _normalized(hidden: Float32s) -> Float32s:
    """Return `hidden` with the length 1."""
    wide = hidden.astype(np.float64)
    found: Float32s = (wide / max(float(np.linalg.norm(wide)), _LEAST_NORM)).astype(np.float32)
    return found
