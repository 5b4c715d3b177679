"""FairExecutor: runs the tasks of several tenants in turn, small ones beside a large one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from engine.fair_queue import FairQueue

log = logging.getLogger("trident.fair_executor")

Task = Callable[[], None]


class FairExecutor:
    """Runs one task after the other, tenants in turn, and small tasks beside a large one.

    What costs more than a limit is large. Of those that wait, a large one is next; while it runs, a
    second thread runs the small ones, so that neither wait for the other kind. Each kind has turns
    of its own. Neither thread is started before there is a task, a large one for the second.
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
        self._small, self._large = FairQueue[Task](), FairQueue[Task]()
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
            is_small = cost <= self._max_small_cost
            (self._small if is_small else self._large).push(task, cost=cost, tenant=tenant)
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
        while (task := self._take_small() if helps else self._take()) is not None:
            try:
                task()
            except Exception:  # the thread must go on for the others
                log.exception("a task of %s failed", self._name)
            del task  # and what it keeps, before the next one comes

    def _take(self) -> Task | None:
        """Wait for the first thread's next task; None if it is to end."""
        with self._work:
            self._large_runs = False
            while not (self._small or self._large):
                if self._closed:
                    self._first_has_ended = True
                    self._small_work.notify()
                    return None
                self._work.wait()
            if not self._large:
                return self._small.pop()
            self._large_runs = True
            self._have_help()
            return self._large.pop()

    def _take_small(self) -> Task | None:
        """Wait for the second thread's next task; None if it is to end."""
        with self._small_work:
            while not (self._large_runs and self._small):
                if self._first_has_ended:
                    return None
                self._small_work.wait()
            return self._small.pop()
