"""Checks of the scheduler's and the KV cache's bookkeeping; they raise `AssertionError`."""

from __future__ import annotations

from engine.core.queue.queue_limits import Load
from engine.core.scheduler import Scheduler


def check_idle(scheduler: Scheduler) -> None:
    """Assert that no block, slot or queue entry is held while there is no request.

    The engine calls it whenever it becomes idle: it compares counters only, in constant time.
    """
    assert not any(
        (scheduler.unfinished, scheduler.waiting.held, scheduler.running, scheduler.waiting)
    )
    assert scheduler.waiting.queued_load == Load()
    assert len(scheduler.slots.free) == len(scheduler.slots.serial)
    scheduler.kv_cache.check_idle()


def check_integrity(scheduler: Scheduler) -> None:
    """Assert that the queues, the counters and the block accounting agree.

    Scans every request and block: for tests and diagnosis.
    """
    running, waiting = scheduler.running, scheduler.waiting
    assert running == sorted(running, key=scheduler.rank)
    waiting.check_integrity()
    assert all(request.slot is None for request in waiting)
    scheduler.slots.check_integrity(running)
    sequences = [*running, *waiting, *waiting.held.values()]
    scheduler.kv_cache.check_integrity(sequences)
    sequences += [fork for request in sequences for fork in request.forks]
    assert {(r.uid, r.index): r for r in sequences} == {
        (uid, index): request
        for uid, siblings in scheduler.unfinished.items()
        for index, request in siblings.items()
    }
