"""What is checked whenever the engine falls idle: cheap, and no loss escapes it."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from engine.core.scheduler import Scheduler, check_idle, check_integrity
from tests.factories.paged_oracle import PagedOracle
from tests.factories.requests import make_request, make_scheduler


class CountingList(list[Any]):
    """Counts the elements that are read, also by functions written in C."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            self.num_reads += 1
            yield value


def used_and_idle(num_blocks: int) -> Scheduler:
    scheduler = make_scheduler(num_blocks=num_blocks, num_host_blocks=num_blocks)
    scheduler.add([make_request(1, range(20), index=i) for i in range(2)])
    PagedOracle(scheduler).run()
    return scheduler


def work_of(check: Callable[[Scheduler], None], scheduler: Scheduler) -> int:
    """Return how many bytecode instructions `check` runs, and elements of the pools it reads."""
    cache = scheduler.kv_cache
    lists = [CountingList(each) for each in (cache.pool._ref_counts, cache.host_pool._free)]
    cache.pool._ref_counts, cache.host_pool._free = lists
    num_instructions = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_instructions
        frame.f_trace_opcodes = True
        num_instructions += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # before settrace, or Python 3.12 traces none at all
    sys.settrace(trace)
    try:
        check(scheduler)
    finally:
        sys.settrace(before)
    return num_instructions + sum(each.num_reads for each in lists)


def test_the_idle_check_does_not_look_at_every_block() -> None:
    few, many = used_and_idle(20), used_and_idle(5000)
    assert 0 < work_of(check_idle, few) == work_of(check_idle, many)
    assert work_of(check_integrity, many) > 5000  # the measure does see a scan


def test_the_idle_check_notices_every_kind_of_loss() -> None:
    scheduler = used_and_idle(20)
    check_idle(scheduler)
    pool, host_pool = scheduler.kv_cache.pool, scheduler.kv_cache.host_pool
    losses: list[tuple[Callable[[], object], Callable[[Any], object]]] = [
        (lambda: pool.allocate(1), pool.release),
        (lambda: host_pool.allocate(1), host_pool.release),
        (lambda: [scheduler.slots.free.pop()], scheduler.slots.free.extend),
        (lambda: scheduler.running.append(make_request(9, [1])), lambda _: scheduler.running.pop()),
        (lambda: scheduler.add([make_request(9, [1])]), lambda _: scheduler.abort(9)),
    ]
    for lose, give_back in losses:
        lost = lose()
        with pytest.raises(AssertionError):
            check_idle(scheduler)
        give_back(lost)
        check_idle(scheduler)


def test_a_second_reference_to_a_block_is_noticed() -> None:
    scheduler = used_and_idle(20)
    pool = scheduler.kv_cache.pool
    (block_id,) = pool.allocate(1) or ()
    pool.share([block_id])
    pool.release([block_id])
    with pytest.raises(AssertionError, match="1 blocks lost"):
        check_idle(scheduler)
    pool.release([block_id])
    check_idle(scheduler)
