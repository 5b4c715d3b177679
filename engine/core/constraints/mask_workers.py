"""MaskWorkers: threads that advance the grammars of sequences by the sampled tokens."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from llguidance import LLExecutor

from engine.text.grammar.matcher import SequenceGrammar

# That a step waits for masks which have been cheap so far. One that is not there by then holds up
# its own sequence alone.
_STEP_S = 0.02
_MAX_THREADS = 8
_NICENESS = 5


class Drawn(NamedTuple):
    """A token that was drawn for a sequence with a grammar.

    Attributes:
        is_wanted: whether the sequence still waits for it.
    """

    grammar: SequenceGrammar
    token_id: int
    is_wanted: Callable[[], bool]

    @property
    def is_ready(self) -> bool:
        """Whether the sequence can take it without delay."""
        return not self.grammar.needs_advance(self.token_id)


class MaskWorkers:
    """Advances grammars, the cheapest first; those that have cost much, in a thread of their own.

    That thread has a lower priority, so that all of them together delay nobody else.
    """

    def __init__(self) -> None:
        """Start no thread before the first token."""
        num_threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) * 4 // 5))
        self._fast = _Lane("masks", num_threads)
        self._slow = _Lane("slow masks", 1, is_slow=True)
        self._any = threading.Event()
        self._awaited = _Batch(0)

    def begin(self, drawn: Sequence[Drawn]) -> None:
        """Begin to advance the grammars of `drawn`."""
        fast = [each for each in drawn if each.grammar.is_fast]
        batch = _Batch(len(fast))
        self._add(self._fast, fast, batch)
        self._add(self._slow, [each for each in drawn if not each.grammar.is_fast], _Batch(0))
        if fast and self._awaited.is_over:
            self._awaited = batch

    def wait(self) -> None:
        """Wait for the cheap ones of the last `begin`, as long as a step may.

        Not if earlier ones, for which a step has waited, are still under way.
        """
        self._awaited.wait_once(_STEP_S)

    def wait_for_any(self, timeout_s: float) -> None:
        """Wait until any grammar has advanced since the last call, for `timeout_s` at most."""
        self._any.wait(timeout_s)
        self._any.clear()

    def _add(self, lane: _Lane, drawn: Sequence[Drawn], batch: _Batch) -> None:
        def done() -> None:
            batch.count_down()
            self._any.set()

        lane.add(drawn, done)


class _Batch:
    """Counts what is left of the tokens of one step."""

    def __init__(self, num_left: int) -> None:
        self._left = iter(range(num_left - 1, -1, -1))  # one `next` is atomic
        self._over = threading.Event()
        self._was_awaited = False
        if not num_left:
            self._over.set()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def count_down(self) -> None:
        if next(self._left, 0) == 0:
            self._over.set()

    def wait_once(self, timeout_s: float) -> None:
        if not self._was_awaited:
            self._was_awaited = True
            self._over.wait(timeout_s)


class _Lane:
    """Threads that share one queue, ordered by what the sequences have cost."""

    def __init__(self, name: str, num_threads: int, *, is_slow: bool = False) -> None:
        self._num_threads = num_threads
        self._is_slow = is_slow
        self._queue: list[tuple[float, int, Drawn, Callable[[], None]]] = []
        self._number = count()
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(num_threads, name, initializer=self._begin_thread)

    def add(self, drawn: Sequence[Drawn], done: Callable[[], None]) -> None:
        """Advance the grammars of `drawn`; call `done` after each of them."""
        for each in drawn:
            # The numbers differ, so that the order needs no more of the tuples: heap operations
            # are atomic.
            item = each.grammar.budget.spent_s, next(self._number), each, done
            heappush(self._queue, item)
        for _ in range(min(len(drawn), self._num_threads)):
            self._threads.submit(self._run)

    def _begin_thread(self) -> None:
        self._local.executor = None
        if self._is_slow:
            os.nice(_NICENESS)
            self._local.executor = LLExecutor(1)

    def _run(self) -> None:
        while self._queue:
            try:
                *_, drawn, done = heappop(self._queue)
            except IndexError:  # another thread has taken the last one
                return
            if drawn.is_wanted():
                drawn.grammar.advance(drawn.token_id, self._local.executor)
            done()
