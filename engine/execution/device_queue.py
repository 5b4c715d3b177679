"""Queues that run the steps of a device one at a time, in the order of submission.

A GPU has its own queue, the CUDA stream: submitted work only launches kernels and returns before
they have run. On a CPU the work runs inline, or on a worker thread for asynchronous scheduling.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class DeviceQueue(Protocol):
    """Runs submitted work in order."""

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        """Run `work` after all that was submitted before.

        The returned function waits for it, and returns its result or raises its error.
        """


class InlineQueue:
    """Runs the work before `submit` returns."""

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        result = work()
        return lambda: result


class WorkerQueue:
    """Runs the work on its own thread, which ends with the queue."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        weakref.finalize(self, self._executor.shutdown, wait=False, cancel_futures=True)

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        return self._executor.submit(work).result
