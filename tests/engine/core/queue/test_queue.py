"""What waits: counted once each, bounded, ended in time, and cheap however many there are."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.engine_config import EngineConfig
from engine.core.engine_core import Deadlines
from engine.core.queue.queue_limits import Load, QueueLimits
from engine.core.request import Request
from engine.core.scheduler import Scheduler, check_integrity
from engine.errors import QueueFullError
from tests.factories.paged_oracle import PagedOracle, check_output
from tests.factories.requests import make_request, make_scheduler
from tests.factories.sampling import samples_of


def counts(scheduler: Scheduler) -> tuple[int, int, int]:
    waiting = scheduler.waiting
    num_admitted = len(waiting.paused) + len(waiting.forked)
    return len(waiting.queued), waiting.queued_load.num_tokens, num_admitted


def load(request: Request) -> Load:
    return Load(request.sampling_params.n, request.num_prompt_tokens)


def test_forks_and_preempted_sequences_are_not_new_requests() -> None:
    scheduler = make_scheduler(max_num_seqs=1, num_blocks=32)
    oracle = PagedOracle(scheduler)
    scheduler.add([make_request(1, range(6), index=i) for i in range(5)])
    scheduler.add([make_request(2, range(7))])
    assert counts(scheduler) == (2, 13, 0)
    oracle.step()
    assert counts(scheduler) == (1, 7, 4)
    assert len(scheduler.waiting) == 5
    assert set(scheduler.unfinished) == {1, 2}
    scheduler.abort(2)
    assert counts(scheduler) == (0, 0, 4)
    scheduler.abort(1)
    assert counts(scheduler) == (0, 0, 0)
    assert not scheduler.unfinished


def test_what_is_preempted_does_not_count_again() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=4)
    oracle = PagedOracle(scheduler)
    for uid in (1, 2):
        scheduler.add([make_request(uid, range(uid * 20, uid * 20 + 7), max_tokens=8)])
    seen = set()
    while scheduler.unfinished:
        oracle.step()
        seen.add(counts(scheduler))
    assert scheduler.num_preemptions > 0
    assert (0, 0, 1) in seen
    assert {num_queued for num_queued, *_ in seen} == {0}


def test_256_sequences_finish_on_a_tiny_cache() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4, max_num_seqs=4)
    prompt = list(range(9))
    group = [make_request(1, prompt, index=i, max_tokens=3) for i in range(256)]
    scheduler.add(group)
    assert len(PagedOracle(scheduler).run()) == 256
    for request in group:
        check_output(request)
    scheduler.kv_cache.check_idle()


def test_siblings_share_the_prompt_until_they_run() -> None:
    prompt = np.arange(9, dtype=np.int32)
    group = [make_request(1, prompt, index=i) for i in range(3)]
    assert all(np.shares_memory(request.token_ids, prompt) for request in group)
    scheduler = make_scheduler()
    scheduler.add(group)
    PagedOracle(scheduler).step()
    assert group[0].num_tokens == 10
    assert not np.shares_memory(group[0].token_ids, prompt)
    assert np.shares_memory(group[1].token_ids, prompt)
    assert prompt.tolist() == list(range(9))


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 14), st.integers(1, 3), st.integers(-1, 1)),
        st.tuples(st.just("abort"), st.integers(0, 12)),
        st.tuples(st.just("step"), st.integers(1, 3)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    events=EVENTS,
    num_blocks=st.integers(9, 30),
    max_num_seqs=st.integers(1, 4),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_the_queue_holds_what_has_never_run(
    events: list[tuple[str, int] | tuple[str, int, int, int]],
    num_blocks: int,
    max_num_seqs: int,
    policy: str,
) -> None:
    """Against a recount over all requests ever made; check_integrity recounts after each step."""
    scheduler = make_scheduler(num_blocks=num_blocks, max_num_seqs=max_num_seqs, policy=policy)
    oracle = PagedOracle(scheduler)
    groups = []
    for event in events:
        if event[0] == "add":
            _, length, n, priority = event
            uid = len(groups)
            group = [
                make_request(uid, [uid % 3] * length, index=i, priority=priority, max_tokens=5, n=n)
                for i in range(n)
            ]
            groups.append(group)
            scheduler.add(group)
        elif event[0] == "abort":
            scheduler.abort(event[1])
        else:
            for _ in range(event[1]):
                if scheduler.unfinished:
                    oracle.step()
        check_integrity(scheduler)
        never_run = [
            group[0]
            for group in groups
            if group[0].times.first_scheduled is None and group[0].finish_reason is None
        ]
        assert sorted(r.uid for r in scheduler.waiting.queued) == [r.uid for r in never_run]
        assert scheduler.waiting.queued_load == sum(map(load, never_run), Load())
        assert set(scheduler.unfinished) == {
            group[0].uid for group in groups if any(r.finish_reason is None for r in group)
        }
    oracle.run()
    assert counts(scheduler) == (0, 0, 0)


def test_what_fits_into_free_slots_is_not_counted() -> None:
    scheduler = make_scheduler(max_num_seqs=4)
    for uid, (n, length) in enumerate([(2, 5), (1, 6), (3, 7), (1, 8)]):
        scheduler.add([make_request(uid, range(length), index=i, n=n) for i in range(n)])
    expected = [Load(7, 26), Load(6, 21), Load(5, 21), Load(4, 15), Load(3, 8), Load(2, 8)]
    expected += [Load(1, 8), Load(), Load()]
    assert [scheduler.waiting.load_without_slot(free) for free in range(9)] == expected


def test_load_without_slot_forks_wait_leaves_their_slots_to_them() -> None:
    scheduler = make_scheduler(max_num_seqs=1, num_blocks=32)
    scheduler.add([make_request(1, range(6), index=i) for i in range(4)])
    scheduler.add([make_request(2, range(7))])
    PagedOracle(scheduler).step()
    assert counts(scheduler) == (1, 7, 3)
    assert [scheduler.waiting.load_without_slot(free) for free in (3, 4)] == [Load(1, 7), Load()]


def test_limits_of_sequences_and_of_tokens() -> None:
    limits = QueueLimits(max_sequences=3, max_tokens=10)
    limits.check(Load(1, 4), Load(2, 6))
    with pytest.raises(QueueFullError, match=r"^Maximum queue size of 3 requests reached"):
        limits.check(Load(3, 2), Load(1, 1))
    with pytest.raises(QueueFullError, match=r"^Maximum queue size of 3 requests reached"):
        limits.check(Load(1, 2), Load(3, 1))
    with pytest.raises(QueueFullError, match=r"of 10 prompt tokens reached \(max_num_queued_tok"):
        limits.check(Load(1, 4), Load(1, 7))


def test_a_request_beyond_the_limits_is_served_when_nothing_waits() -> None:
    QueueLimits(max_sequences=2, max_tokens=10).check(Load(0, 0), Load(256, 1000))


def test_the_default_of_tokens_scales_with_cache_and_requests_up_to_what_fits_in_memory() -> None:
    config = EngineConfig(max_num_queued_reqs=8)

    def limits(config: EngineConfig, kv_cache_tokens: int) -> QueueLimits:
        return QueueLimits.of(config, kv_cache_tokens=kv_cache_tokens, max_num_seqs=4)

    assert limits(config, 100) == QueueLimits(8, 200)
    assert limits(config, 10**9) == QueueLimits(8, 2**22)
    given = config.model_copy(update={"max_num_queued_tokens": 7})
    assert limits(given, 100) == QueueLimits(8, 7)


def test_deadlines_come_in_order_and_those_of_the_finished_do_not() -> None:
    unfinished = {1: "", 2: "", 3: ""}
    deadlines = Deadlines(unfinished.keys())
    for uid, deadline in ((1, 30.0), (2, 10.0), (3, 20.0)):
        deadlines.add(uid, deadline)
    assert deadlines.expired(9.9) == []
    del unfinished[3]
    assert deadlines.expired(30.0) == [2, 1]
    assert len(deadlines) == 0


def test_deadlines_of_finished_requests_do_not_pile_up() -> None:
    unfinished: dict[int, str] = {}
    deadlines = Deadlines(unfinished.keys())
    for uid in range(10_000):
        unfinished[uid] = ""
        deadlines.add(uid, 1e9)
        if uid >= 20:
            del unfinished[uid - 20]
        assert len(deadlines) <= 110


def test_thousands_of_waiting_requests_cost_a_step_nothing() -> None:
    """Compared with few, and generously: a scan of the queue would be 100 times slower."""

    def best_step_s(num_queued: int) -> float:
        scheduler = make_scheduler(
            max_num_seqs=64, max_num_batched_tokens=512, num_blocks=2048, block_size=16
        )
        for uid in range(64 + num_queued):
            scheduler.add([make_request(uid, [uid % 50, 1, 2], max_tokens=100)])
        times = []
        for _ in range(30):
            start = time.perf_counter()
            schedule = scheduler.schedule()
            scheduler.update(samples_of([1] * schedule.num_rows))
            scheduler.abort(scheduler.running[0].uid)  # and one takes its place
            times.append(time.perf_counter() - start)
        return min(times)

    assert best_step_s(20_000) < 3 * best_step_s(50) + 1e-4
