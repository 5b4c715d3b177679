"""The host's waiting time for the device: the rest of a step's time is host work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from engine.execution.pending_step import PendingStep


class WaitClock:
    """Sums the seconds that the engine waits for the tokens of its steps.

    Attributes:
        seconds: total so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure inside the block, for every engine of this process."""
        wait = PendingStep.wait

        def timed(sent: PendingStep) -> object:
            start = time.perf_counter()
            try:
                return wait(sent)
            finally:
                self.seconds += time.perf_counter() - start

        with patch.object(PendingStep, "wait", timed):
            yield
