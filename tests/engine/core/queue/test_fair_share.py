"""Tenants share the engine: none waits for more than its share of another's requests."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.queue.queue_limits import Load, QueueLimits
from engine.core.queue.tenant_shares import TenantShares
from engine.core.request import Request
from engine.core.scheduler import Scheduler, check_integrity
from engine.errors import QueueFullError
from tests.factories.arrivals import LAST_STEP
from tests.factories.beams import make_beams
from tests.factories.paged_oracle import PagedOracle, check_output
from tests.factories.requests import make_request, make_scheduler

LIMITS = QueueLimits(max_sequences=4, max_tokens=100)


def flood(scheduler: Scheduler, num: int, *, first_uid: int = 0, **fields: object) -> list[Request]:
    """Queue requests of the tenant "many", with prompts that share nothing."""
    requests = []
    for uid in range(first_uid, first_uid + num):
        fields = {"tenant": "many", "max_tokens": 12, **fields}
        requests.append(make_request(uid, [uid % 50, 1, 2, 3, 4], **fields))
        scheduler.add(requests[-1:])
    return requests


def share(scheduler: Scheduler) -> Counter[str]:
    return Counter(request.tenant for request in scheduler.running)


@pytest.mark.parametrize("num_host_blocks", [0, 40], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_newcomer_runs_at_once_and_then_as_many_as_the_others(
    num_ahead: int, num_host_blocks: int
) -> None:
    scheduler = make_scheduler(num_blocks=65, num_host_blocks=num_host_blocks)
    oracle = PagedOracle(scheduler, num_ahead)
    many = flood(scheduler, 30)
    for _ in range(3):
        oracle.step()
    assert share(scheduler) == {"many": 4}
    few = [make_request(100 + i, [40 + i] * 5, tenant="few", max_tokens=12) for i in range(6)]
    for request in few:
        scheduler.add([request])
    oracle.step()
    assert share(scheduler) == {"many": 3, "few": 1}
    assert scheduler.num_preemptions == 1  # for the first of a tenant alone
    while not all(request.times.first_scheduled for request in few):
        oracle.step()
    # Half of the slots each, from when the flood's first ones have ended.
    assert share(scheduler) == {"many": 2, "few": 2}
    assert sum(request.finish is not None for request in many) <= 12
    oracle.run()
    for request in [*many, *few]:
        check_output(request)


def test_blocks_are_freed_for_a_newcomer() -> None:
    scheduler = make_scheduler(num_blocks=14, max_num_seqs=8)
    oracle = PagedOracle(scheduler)
    flood(scheduler, 8)
    for _ in range(4):
        oracle.step()
    assert scheduler.slots.free
    newcomer = make_request(100, [9] * 14, tenant="few", max_tokens=4)
    scheduler.add([newcomer])
    for _ in range(4):
        oracle.step()
    assert newcomer.times.first_scheduled is not None
    oracle.run()
    check_output(newcomer)


def test_what_has_got_blocks_in_a_step_is_not_preempted_for_what_follows() -> None:
    """The blocks may be written into before the step; a search copies those that it shares."""
    scheduler = make_scheduler(
        num_blocks=12, max_num_seqs=3, max_num_batched_tokens=6, enable_prefix_caching=False
    )
    oracle = PagedOracle(scheduler)
    prompt = [10 + i % 7 for i in range(6)]
    scheduler.add([*make_beams(0, prompt, width=2, max_tokens=8, tenant="many")])
    for uid in range(1, 5):
        scheduler.add([make_request(uid, [0], max_tokens=1, tenant="many")])
    newcomer = make_request(5, [i % 7 for i in range(19)], max_tokens=3, tenant="few")
    scheduler.add([newcomer])
    oracle.run()
    assert scheduler.num_preemptions > 0
    check_output(newcomer)


def test_a_newcomer_does_not_displace_a_higher_priority_nor_the_only_one() -> None:
    scheduler = make_scheduler(policy="priority")
    oracle = PagedOracle(scheduler)
    flood(scheduler, 4, priority=-1)
    scheduler.add([make_request(100, [9] * 5, tenant="few")])
    oracle.step()
    assert share(scheduler) == {"many": 4}
    oracle.run()
    one_each = [make_request(200 + i, [i] * 5, tenant=str(i), max_tokens=8) for i in range(5)]
    for request in one_each:
        scheduler.add([request])
    oracle.step()
    assert share(scheduler) == {"0": 1, "1": 1, "2": 1, "3": 1}
    assert scheduler.num_preemptions == 0


def test_newcomer_every_tenant_has_one_preempts_none() -> None:
    scheduler = make_scheduler(num_blocks=65)
    oracle = PagedOracle(scheduler)
    for uid in range(4):
        scheduler.add([make_request(uid, [uid] * 5, tenant=str(uid), max_tokens=8)])
    oracle.step()
    newcomer = make_request(100, [9] * 5, tenant="few")
    scheduler.add([newcomer])
    for _ in range(4):
        oracle.step()
        assert share(scheduler) == {"0": 1, "1": 1, "2": 1, "3": 1}
    oracle.run()
    assert scheduler.num_preemptions == 0
    check_output(newcomer)


def test_a_search_that_has_begun_is_not_held_up() -> None:
    """Its beams keep their slots, and those that have none yet come before newcomers."""
    scheduler = make_scheduler(num_blocks=65)
    oracle = PagedOracle(scheduler)
    beams = make_beams(0, [1, 2, 3, 4, 5], width=4, n=1, max_tokens=8, tenant="many")
    scheduler.add([*beams])
    oracle.step()
    newcomer = make_request(100, [9] * 5, tenant="few")
    scheduler.add([newcomer])
    while scheduler.unfinished.get(0):
        oracle.step()
        assert not (scheduler.unfinished.get(0) and newcomer.times.first_scheduled)
    oracle.run()
    check_output(newcomer)
    assert scheduler.num_preemptions == 0


def test_one_search_after_another_does_not_keep_a_newcomer_out() -> None:
    """When one ends nobody has anything, and who had the last turn is not the next."""
    scheduler = make_scheduler(num_blocks=65)
    oracle = PagedOracle(scheduler)
    for uid in range(3):
        scheduler.add([*make_beams(uid, [uid, 2, 3], width=4, n=1, max_tokens=5, tenant="many")])
    oracle.step()
    newcomer = make_request(100, [9] * 5, tenant="few")
    scheduler.add([newcomer])
    while newcomer.times.first_scheduled is None:
        oracle.step()
    assert [uid for uid in range(3) if uid in scheduler.unfinished] == [1, 2]
    oracle.run()
    check_output(newcomer)


def test_shares_of_very_many_tenants_forget_whose_turn_was_longest_ago() -> None:
    shares = TenantShares()
    tenants = [str(number) for number in range(4100)]
    for tenant in tenants:
        shares.begin(tenant)
        shares.end(tenant)
        shares.changed.clear()
    assert shares.of(tenants[3]) == shares.of("who has never come") == (0, 0)
    assert shares.of(tenants[4]) == (0, 5)
    shares.begin("one more")
    assert shares.changed == {tenants[4], "one more"}  # for the waiting queues to read anew


def test_a_full_queue_takes_a_request_of_who_has_less_in_it() -> None:
    scheduler = make_scheduler()
    many = flood(scheduler, 4)
    queue = scheduler.waiting

    def displaced(uid: int, tenant: str) -> list[Request]:
        return queue.displaced_by(make_request(uid, [9] * 5, tenant=tenant), LIMITS, 0)

    for displaced_one in (many[3], many[2]):  # the last one first, until both have two
        uid = 100 + displaced_one.uid
        assert displaced(uid, "few") == [displaced_one]
        scheduler.abort(displaced_one.uid)
        scheduler.add([make_request(uid, [9] * 5, tenant="few")])
    for tenant in ("few", "many"):
        with pytest.raises(QueueFullError):
            displaced(200, tenant)
    assert displaced(200, "third") in ([many[1]], [scheduler.unfinished[103][0]])


def test_long_prompts_are_the_larger_share() -> None:
    scheduler = make_scheduler()
    for uid in (0, 1):
        scheduler.add([make_request(uid, [uid] * 45, tenant="long")])
    newcomer = make_request(2, [2] * 20, tenant="short")
    assert scheduler.waiting.displaced_by(newcomer, LIMITS, 0) == [scheduler.unfinished[1][0]]
    scheduler.abort(1)
    newcomer = make_request(2, [2] * 56, tenant="short")
    with pytest.raises(QueueFullError, match="100 prompt tokens"):  # "long" would have nothing
        scheduler.waiting.displaced_by(newcomer, LIMITS, 0)


@settings(max_examples=60, deadline=None)
@given(
    waiting=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.integers(0, 1)), max_size=12
    ),
    new=st.tuples(st.sampled_from("abcd"), st.integers(1, 30), st.integers(0, 1)),
)
def test_no_tenant_is_displaced_below_the_newcomer(
    waiting: list[tuple[str, int, int]], new: tuple[str, int, int]
) -> None:
    scheduler = make_scheduler(policy="priority")
    queue = scheduler.waiting

    def request(uid: int, tenant: str, length: int, priority: int) -> Request:
        return make_request(uid, [uid] * length, tenant=tenant, priority=priority)

    for uid, fields in enumerate(waiting):
        scheduler.add([request(uid, *fields)])
    newcomer = request(100, *new)
    try:
        displaced = queue.displaced_by(newcomer, LIMITS, 0)
    except QueueFullError:
        displaced = []
    else:
        left = [each for each in queue.queued if each not in displaced]
        tokens = sum(each.num_prompt_tokens for each in [*left, newcomer])
        assert not left or (len(left) < LIMITS.max_sequences and tokens <= LIMITS.max_tokens)
    assert all(each.priority >= newcomer.priority for each in displaced)
    for each in displaced:
        if each.priority == newcomer.priority:
            of_same = [r for r in queue.queued if r.tenant == each.tenant and r not in displaced]
            own = [r for r in queue.queued if r.tenant == newcomer.tenant]
            assert each.tenant != newcomer.tenant
            assert LIMITS.share(_load(of_same)) >= LIMITS.share(_load([*own, newcomer]))
    check_integrity(scheduler)


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, LAST_STEP), st.integers(1, 20)),
        min_size=2,
        max_size=20,
    ),
)
def test_no_tenant_waits_while_another_has_several(asked: list[tuple[str, int, int]]) -> None:
    """In each step one that had none gets a slot, if blocks are no matter."""
    scheduler = make_scheduler(num_blocks=400, max_num_seqs=3, max_num_batched_tokens=200)
    oracle = PagedOracle(scheduler)
    for step in range(LAST_STEP + 1):
        for uid, (tenant, arrival, max_tokens) in enumerate(asked):
            if arrival == step:
                prompt = [uid, uid, uid]
                scheduler.add([make_request(uid, prompt, tenant=tenant, max_tokens=max_tokens)])
        before = share(scheduler)
        schedule = scheduler.schedule()
        check_integrity(scheduler)
        now = share(scheduler)
        if {request.tenant for request in scheduler.waiting} - now.keys():
            assert max(now.values()) == 1 or len(now) > len(before)
        if schedule.num_rows:
            scheduler.update(oracle.execute(schedule))
    oracle.run()


def _load(requests: list[Request]) -> Load:
    return Load(len(requests), sum(each.num_prompt_tokens for each in requests))
