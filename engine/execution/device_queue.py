"""Where the steps of a device run: in the order in which they were submitted, one at a time.

A GPU has such a queue of its own, the CUDA stream: work that is submitted there only launches
kernels and returns before they have run. On a CPU the work is done at once, or by a thread, so
that there too the host can run ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class DeviceQueue(Protocol):
    """Takes work, in order."""

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        """Have `work` done after all that was submitted before.

        The returned function waits for it, and returns or raises what it did.
        """


class InlineQueue:
    """Does the work before `submit` returns."""

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        result = work()
        return lambda: result


class WorkerQueue:
    """Does the work on a thread of its own, which ends with the queue."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        weakref.finalize(self, self._executor.shutdown, wait=False, cancel_futures=True)

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        return self._executor.submit(work).result
