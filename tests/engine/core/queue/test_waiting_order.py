"""The waiting queue's head: found in few operations, and nobody is bypassed without end."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.queue.rank import Rank, rank_fcfs
from engine.core.queue.tenant_shares import TenantShares
from engine.core.queue.waiting_queues import WaitingQueues
from engine.core.request import MAX_BYPASSED, Request
from engine.core.scheduler import Scheduler
from tests.factories.arrivals import Arrival, arrivals, schedulers
from tests.factories.beams import make_beams
from tests.factories.paged_oracle import PagedOracle, check_output
from tests.factories.requests import make_request, make_scheduler


class CountedRank:
    """`rank_fcfs`, which counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, request: Request) -> Rank:
        self.num_calls += 1
        return rank_fcfs(request)


class CountedShares(TenantShares):
    """Counts how often a share is asked for."""

    num_calls = 0

    def of(self, tenant: str) -> tuple[int, int]:
        self.num_calls += 1
        return super().of(tenant)


@pytest.mark.parametrize("num_passed_over", [0, 900])
def test_head_of_many_tenants_costs_few_operations(num_passed_over: int) -> None:
    """Each admission, of 900 tenants with a request each, looks at a few of them."""
    rank, shares = CountedRank(), CountedShares()
    waiting = WaitingQueues(rank, shares)
    for uid in range(num_passed_over):
        waiting.push(make_request(uid, [1], tenant=str(uid)))
        waiting.pass_over(waiting.head or pytest.fail("somebody waits"))
    for uid in range(1000, 1900):
        waiting.push(make_request(uid, [1], tenant=str(uid)))
    rank.num_calls = shares.num_calls = 0
    for uid in range(1000, 1900):
        for _ in range(3):  # a step asks several times
            head = waiting.head
        assert head is not None
        assert head.uid == uid
        waiting.admit(head)
        shares.begin(head.tenant)
    assert rank.num_calls < 100 * 900
    assert shares.num_calls < 10 * 900


def test_requests_that_wait_for_a_prefix_cost_a_step_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are looked at again when it has been computed, however long that takes."""
    scheduler = make_scheduler(
        num_blocks=300, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=512
    )
    prompt = [i % 50 for i in range(400)]
    for uid in range(60):
        scheduler.add([make_request(uid, prompt, max_tokens=1)])
    oracle = PagedOracle(scheduler)
    for _ in range(3):
        oracle.step()
    taken_back: list[Request] = []
    monkeypatch.setattr(scheduler.waiting, "take_back", taken_back.append)
    passed_over = scheduler.waiting._passed_over
    assert len(passed_over) == 59
    waits = scheduler._admission._prefixes._waits
    (heap,) = waits.values()
    pushed = len(heap)
    for _ in range(10):
        oracle.step()
    assert taken_back == []
    assert waits == {scheduler.running[0]: heap}  # the same one
    assert len(heap) == pushed


def traffic(
    scheduler: Scheduler, tenant: Callable[[int], str], length: int, priority: int = 0
) -> Iterator[Request]:
    """Add requests without end; yield each."""
    uid = 1000
    while True:
        prompt = [uid % 50] * length
        request = make_request(uid, prompt, max_tokens=2, tenant=tenant(uid), priority=priority)
        scheduler.add([request])
        yield request
        uid += 1


def num_steps_until(
    oracle: PagedOracle, is_over: Callable[[], bool], newcomers: Iterator[Request]
) -> int:
    """Run beside `newcomers`, of whom one waits at any time, until `is_over`; return the steps."""
    newest = next(newcomers)
    for step in range(3000):
        if is_over():
            return step
        if newest.times.first_scheduled is not None:
            newest = next(newcomers)
        oracle.step()
    raise AssertionError("it is bypassed without end")


def test_large_request_beside_small_ones_of_another_tenant_is_admitted() -> None:
    """It fits beside the running request of its tenant, but not beside a small one too."""
    scheduler = make_scheduler(
        num_blocks=14, block_size=64, max_num_batched_tokens=512, max_model_len=2048, max_num_seqs=8
    )
    oracle = PagedOracle(scheduler)
    runs = make_request(0, [1], max_tokens=400, tenant="a")
    scheduler.add([runs])
    oracle.step()
    small = traffic(scheduler, lambda uid: "b", 200)
    first = next(small)
    oracle.step()
    assert first.slot is not None
    large = make_request(1, [i % 50 for i in range(500)], max_tokens=2, tenant="a")
    scheduler.add([large])
    num_steps = num_steps_until(oracle, lambda: large.times.first_scheduled is not None, small)
    assert runs.finish is None
    assert large.times.num_bypassed == MAX_BYPASSED
    assert num_steps < 5 * MAX_BYPASSED


def test_search_in_one_slot_beside_small_requests_of_other_tenants_goes_on() -> None:
    """None of its beams runs when it has chosen: each token of each beam would be one more wait."""
    scheduler = make_scheduler(num_blocks=65, max_num_seqs=1)
    oracle = PagedOracle(scheduler)

    def search(uid: int) -> list[Request]:
        return [*make_beams(uid, [7, 8, 9], width=8, n=8, max_tokens=40, tenant="a")]

    scheduler.add(search(0))
    num_alone = 0
    while scheduler.unfinished:
        oracle.step()
        num_alone += 1
    beams = search(1)
    scheduler.add(beams)
    small = traffic(scheduler, lambda uid: "bcdefgh"[uid % 7], 6)
    num_steps = num_steps_until(oracle, lambda: beams[0].finish is not None, small)
    assert num_steps < num_alone + 4 * MAX_BYPASSED


def test_request_is_not_preempted_for_new_tenants_without_end() -> None:
    """One comes whenever it has computed a part of its prompt again."""
    scheduler = make_scheduler(
        num_blocks=65,
        block_size=16,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        enable_prefix_caching=False,
        max_model_len=1024,
    )
    oracle = PagedOracle(scheduler)
    beside = make_request(0, [1], max_tokens=600, tenant="a")
    often = make_request(1, [i % 50 for i in range(60)], max_tokens=4, tenant="a")
    for request in (beside, often):
        scheduler.add([request])
    newcomers = traffic(scheduler, str, 4)
    while often.finish is None:
        oracle.step()
        if often.slot is not None and often.num_computed_tokens > 16:
            next(newcomers)
        assert often.num_preemptions <= MAX_BYPASSED
    assert beside.finish is None
    assert often.num_preemptions > 1
    check_output(often)


@settings(max_examples=15, deadline=None)
@given(
    asked=st.lists(
        st.tuples(arrivals(abort=st.none()), st.sampled_from([None, 2, 6])), min_size=1, max_size=6
    ),
    scheduler=schedulers(),
    length=st.integers(1, 20),
)
def test_every_request_that_fits_alone_is_admitted_in_bounded_steps(
    asked: list[tuple[Arrival, int | None]], scheduler: Scheduler, length: int
) -> None:
    """Beams, samples, priorities, tenants and preemption, beside arrivals that never cease."""
    oracle = PagedOracle(scheduler)
    groups: list[list[Request]] = []
    for uid, (arrival, width) in enumerate(asked):
        group = arrival.group(uid)
        if width is not None:
            search = make_beams(
                uid,
                group[0].token_ids,
                width=width,
                max_tokens=arrival.max_tokens,
                priority=arrival.priority,
                tenant=arrival.tenant,
            )
            group = [*search]
        groups.append(group)
        scheduler.add(group)
    # Of the lowest priority of all: a higher one may bypass for ever.
    small = traffic(scheduler, lambda uid: "cde"[uid % 3], length, priority=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("engine.core.request.MAX_BYPASSED", 8)
        num_steps_until(
            oracle,
            lambda: all(each.finish is not None for group in groups for each in group),
            small,
        )
    assert max(group[0].times.num_bypassed for group in groups) <= 8
