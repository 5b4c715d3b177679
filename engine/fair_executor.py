"""FairExecutor: runs the tasks of several tenants in turn, small ones beside a large one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

log = logging.getLogger("trident.fair_executor")

Task = Callable[[], None]


class FairExecutor:
    """Runs one task after the other, by self-clocked fair queueing over the tenants.

    A task ends, in virtual time, as much after the one before it of its tenant as it costs, or
    after the one that began last if that is later. The task that ends first is next: so each tenant
    gets the same cost done, and one that has had nothing done is next. Of a tenant's own tasks,
    neither the small ones overtake each other nor the large ones.

    While a large task runs, a second thread runs small ones, so that these wait for no large one.
    Neither thread is started before it is needed.
    """

    def __init__(
        self, name: str, *, max_small_cost: int, initializer: Callable[[], None] = lambda: None
    ) -> None:
        """Tasks that cost more than `max_small_cost` are large; each thread calls `initializer`."""
        self._name = name
        self._max_small_cost = max_small_cost
        self._initializer = initializer
        lock = threading.Lock()
        self._work, self._small_work = threading.Condition(lock), threading.Condition(lock)
        # By the end in virtual time, then by arrival: the end, a unique number, tenant and task.
        self._small: list[tuple[int, int, str, Task]] = []
        self._large: list[tuple[int, int, str, Task]] = []
        self._numbers = count()
        self._now = 0  # in virtual time
        self._ends: dict[str, int] = {}  # of the last task that waits, by tenant
        self._large_runs = False
        self._closed = False  # then the first thread ends when nothing waits, and then the second
        self._first_has_ended = False
        self._threads: list[threading.Thread] = []

    def submit(self, task: Task, *, cost: int, tenant: str = "") -> None:
        """Have `task` called in a thread. What it raises is logged.

        Args:
            cost: at least 1, in any unit.
            tenant: on whose behalf.
        """
        assert cost >= 1
        with self._work:
            assert not self._closed
            end = self._ends[tenant] = max(self._now, self._ends.get(tenant, 0)) + cost
            is_small = cost <= self._max_small_cost
            queue = self._small if is_small else self._large
            heappush(queue, (end, next(self._numbers), tenant, task))
            if not self._threads:
                self._start(helps=False)
            self._work.notify()
            if is_small and self._large_runs:
                self._have_help()

    def close(self) -> None:
        """Run what waits, then end the threads. Repeatable."""
        with self._work:
            self._closed = True
            self._work.notify()
        for thread in self._threads:
            thread.join()

    def _start(self, *, helps: bool) -> None:
        name = f"{self._name}-small" if helps else self._name
        thread = threading.Thread(target=self._run, args=(helps,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _have_help(self) -> None:
        """Have the second thread look for small tasks."""
        if len(self._threads) == 1:
            self._start(helps=True)
        self._small_work.notify()

    def _run(self, helps: bool) -> None:
        self._initializer()
        while (task := self._take(helps)) is not None:
            try:
                task()
            except Exception:  # the thread must go on for the others
                log.exception("a task of %s failed", self._name)
            del task  # and what it keeps, before the next one comes

    def _take(self, helps: bool) -> Task | None:
        """Wait for the next task of a thread; None if it is to end."""
        with self._work:
            if not helps:
                self._large_runs = False
            while (queue := self._next_queue(helps)) is None:
                if helps and self._first_has_ended:
                    return None
                if not helps and self._closed:
                    self._first_has_ended = True
                    self._small_work.notify()
                    return None
                (self._small_work if helps else self._work).wait()
            end, _, tenant, task = heappop(queue)
            self._now = max(self._now, end)
            if self._ends.get(tenant) == end:
                del self._ends[tenant]
            if not helps and queue is self._large:
                self._large_runs = True
                if self._small:
                    self._have_help()
            return task

    def _next_queue(self, helps: bool) -> list[tuple[int, int, str, Task]] | None:
        """Return the queue whose first task a thread takes now; None if it has to wait."""
        if helps:
            return self._small if self._small and self._large_runs else None
        queues = [queue for queue in (self._small, self._large) if queue]
        return min(queues, key=lambda queue: queue[0], default=None)
