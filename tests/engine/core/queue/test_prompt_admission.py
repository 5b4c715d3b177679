"""When waiting requests begin to run: with all of their blocks, in order, and none for nothing."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.kv.prefix_cache import PrefixCache
from engine.core.kv.tables import Tables
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from tests.factories.arrivals import Arrival, arrivals, schedulers
from tests.factories.paged_oracle import PagedOracle, check_output
from tests.factories.requests import make_request, make_scheduler, note_passed_over


def count_lookups(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Return a counter of look-ups in the prefix cache by uid, which goes on counting."""
    lookups: Counter[int] = Counter()
    find = PrefixCache.find

    def counted(cache: PrefixCache, request: Request) -> tuple[Tables, bytes | None]:
        lookups[request.uid] += 1
        return find(cache, request)

    monkeypatch.setattr(PrefixCache, "find", counted)
    return lookups


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    """Its first chunk would fit at once, and would be thrown away some steps later."""
    scheduler = make_scheduler(num_blocks=17, max_num_batched_tokens=8, max_num_seqs=2)
    oracle = PagedOracle(scheduler)
    first, long = make_request(1, range(20), max_tokens=16), make_request(2, range(100, 140))
    for request in (first, long):
        scheduler.add([request])
    oracle.run()
    assert scheduler.num_preemptions == 0
    assert oracle.num_computed_tokens == (20 + 15) + (40 + 3)
    check_output(long)


def test_what_does_not_fit_is_not_looked_up_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(num_blocks=17, max_num_seqs=3)
    lookups = count_lookups(scheduler, monkeypatch)
    oracle = PagedOracle(scheduler)
    for uid, length, max_tokens in ((1, 52, 12), (2, 30, 2), (3, 20, 2)):
        scheduler.add(
            [make_request(uid, range(uid * 90, uid * 90 + length), max_tokens=max_tokens)]
        )
    oracle.run()
    assert lookups == {1: 1, 2: 2, 3: 1}  # the second once more, after the first has ended


def test_refused_prompt_another_sequence_ends_is_considered_again() -> None:
    """No more blocks are free than when it was refused, but fewer are kept in reserve."""
    scheduler = make_scheduler(num_blocks=9, enable_prefix_caching=False)
    oracle = PagedOracle(scheduler)
    long, short = make_request(1, range(4), max_tokens=24), make_request(2, range(3), max_tokens=7)
    refused = make_request(3, range(10, 22), max_tokens=2)
    for request in (long, short, refused):
        scheduler.add([request])
    num_free = None
    while short.finish is None:
        oracle.step()
        num_free = num_free or scheduler.kv_cache.pool.num_free
    assert scheduler.kv_cache.pool.num_free <= num_free
    assert refused.times.first_scheduled is None
    oracle.step()
    assert refused.times.first_scheduled is not None
    oracle.run()
    check_output(refused)


@pytest.mark.parametrize("num_blocks", [150, 220])
def test_what_a_prefill_gives_back_behind_its_windows_lets_the_next_one_in(num_blocks: int) -> None:
    """The first sequence holds the tokens of a whole chunk in each window while it prefills."""
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=48,
        windows=(None, 8, 8, 8, 8, 8),
        max_model_len=256,
    )
    oracle = PagedOracle(scheduler)
    first = make_request(1, range(96), max_tokens=120)
    second = make_request(2, range(100, 148), max_tokens=4)
    for request in (first, second):
        scheduler.add([request])
    oracle.step()
    assert second.slot is None
    oracle.run()
    assert second.times.first_token < first.times.last_token
    assert scheduler.num_preemptions == 0
    for request in (first, second):
        check_output(request)


def test_without_chunked_prefill_a_prompt_that_waits_for_a_budget_is_not_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_scheduler(
        num_blocks=40, max_num_batched_tokens=8, enable_chunked_prefill=False
    )
    lookups = count_lookups(scheduler, monkeypatch)
    oracle = PagedOracle(scheduler)
    for uid, length in ((1, 4), (2, 8)):
        scheduler.add([make_request(uid, range(uid * 50, uid * 50 + length), max_tokens=20)])
    oracle.run()
    assert lookups == {1: 1, 2: 2}


@pytest.mark.parametrize("length", [61, 64])
def test_a_request_that_fits_into_an_empty_cache_gets_in(length: int) -> None:
    """Behind forks that hold blocks and behind others that run and grow."""
    scheduler = make_scheduler(num_blocks=17, max_num_seqs=2, max_num_batched_tokens=16)
    scheduler.add([make_request(1, range(14), index=i, max_tokens=9) for i in range(5)])
    whole = make_request(2, range(100, 100 + length), max_tokens=65 - length)
    scheduler.add([whole])
    scheduler.add([make_request(3, range(14), max_tokens=5)])
    PagedOracle(scheduler).run()
    check_output(whole)
    assert whole.num_preemptions == 0


def test_forks_that_wait_give_up_their_blocks_when_nothing_else_runs() -> None:
    scheduler = make_scheduler(num_blocks=5, max_num_seqs=4, policy="priority")
    oracle = PagedOracle(scheduler)
    group = [make_request(1, range(13), index=i, max_tokens=2, priority=1) for i in range(4)]
    scheduler.add(group)
    oracle.step()  # all blocks are the prompt's, and the forks need one more
    urgent = make_request(2, range(50, 63), max_tokens=2)
    scheduler.add([urgent])
    oracle.run()
    for request in (*group, urgent):
        check_output(request)


def equal_prompts(scheduler: Scheduler, count: int, length: int, n: int = 1) -> list[list[Request]]:
    groups = [
        [make_request(uid, range(length), index=i, max_tokens=3) for i in range(n)]
        for uid in range(count)
    ]
    for group in groups:
        scheduler.add(group)
    return groups


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("budget", [12, 16, 200])
@pytest.mark.parametrize("threshold", [0, 3, 8])
def test_equal_prompts_are_computed_once(num_ahead: int, budget: int, threshold: int) -> None:
    """In one step, or while the first one is computed in chunks."""
    scheduler = make_scheduler(
        num_blocks=100, max_num_batched_tokens=budget, long_prefill_token_threshold=threshold
    )
    oracle = PagedOracle(scheduler, num_ahead)
    groups = equal_prompts(scheduler, 4, 42)
    oracle.run()
    # Of 42 tokens, 2 are in a block that is not full; each decodes two more tokens.
    assert oracle.num_computed_tokens == 42 + 3 * 2 + 4 * 2
    assert [group[0].num_cached_tokens for group in groups] == [0, 40, 40, 40]
    for (request,) in groups:
        check_output(request)


def test_equal_prompts_with_forks_are_computed_once() -> None:
    scheduler = make_scheduler(num_blocks=100, max_num_batched_tokens=100, max_num_seqs=8)
    oracle = PagedOracle(scheduler)
    groups = equal_prompts(scheduler, 2, 42, n=3)
    oracle.run()
    # Each fork computes the last token of the prompt once more.
    assert oracle.num_computed_tokens == 42 + 2 + 4 * 1 + 6 * 2
    for group in groups:
        for request in group:
            check_output(request)


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("threshold", [0, 8])
def test_when_the_first_of_equal_prompts_is_aborted_the_others_go_on(
    num_steps: int, threshold: int
) -> None:
    scheduler = make_scheduler(
        num_blocks=100, max_num_batched_tokens=16, long_prefill_token_threshold=threshold
    )
    oracle = PagedOracle(scheduler, num_ahead=1)
    groups = equal_prompts(scheduler, 3, 62)
    for _ in range(num_steps):
        oracle.step()
    # Of a block that is not full yet, nothing is in the prefix cache.
    num_lost = groups[0][0].num_computed_tokens % scheduler.kv_cache.block_size
    scheduler.abort(0)
    oracle.run()
    assert oracle.num_computed_tokens == 62 + 2 + 2 * 2 + num_lost
    for (request,) in groups[1:]:
        check_output(request)


def test_without_prefix_caching_equal_prompts_share_nothing() -> None:
    scheduler = make_scheduler(
        num_blocks=100, max_num_batched_tokens=100, enable_prefix_caching=False
    )
    oracle = PagedOracle(scheduler)
    for (request,) in equal_prompts(scheduler, 2, 42):
        assert request.num_cached_tokens == 0
    oracle.run()
    assert oracle.num_computed_tokens == 2 * (42 + 2)


def test_another_prompt_overtakes_one_that_waits_for_its_prefix() -> None:
    scheduler = make_scheduler(
        num_blocks=100, max_num_batched_tokens=16, long_prefill_token_threshold=8
    )
    equal_prompts(scheduler, 2, 62)
    scheduler.add([make_request(7, range(100, 104))])
    scheduler.schedule()
    assert {request.uid for request in scheduler.running} == {0, 7}


def test_many_that_wait_for_one_prefix_are_in_no_others_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are looked up when they come and when the prefix is there, not in each step."""
    scheduler = make_scheduler(
        num_blocks=400, max_num_seqs=40, max_num_batched_tokens=64, long_prefill_token_threshold=8
    )
    lookups = count_lookups(scheduler, monkeypatch)
    oracle = PagedOracle(scheduler)
    (first,), *others = equal_prompts(scheduler, 30, 202)
    short = make_request(99, range(300, 304), max_tokens=2)
    scheduler.add([short])
    oracle.run()
    assert short.times.last_token < first.times.first_token
    assert lookups == {0: 1, 99: 1} | {request.uid: 2 for (request,) in others}
    assert {request.num_cached_tokens for (request,) in others} == {200}
    check_output(short)


def test_one_that_waits_for_a_long_prefix_is_looked_up_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.core.queue.prompt_admission._MAX_BLOCKS", 10)
    scheduler = make_scheduler(num_blocks=100, long_prefill_token_threshold=8)
    lookups = count_lookups(scheduler, monkeypatch)
    oracle = PagedOracle(scheduler)
    _, (second,) = equal_prompts(scheduler, 2, 162)
    oracle.run()
    assert lookups == {0: 1, 1: 5}
    assert second.num_cached_tokens == 160
    check_output(second)


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(
        arrivals(
            step=st.integers(0, 15),
            length=st.integers(1, 60),
            max_tokens=st.integers(1, 20),
            abort=st.none(),
            tenant=st.just(""),
        ),
        min_size=1,
        max_size=12,
    ),
    scheduler=schedulers(
        num_blocks=st.integers(22, 60),
        max_num_batched_tokens=st.integers(6, 80),
        num_host_blocks=st.sampled_from([0, 30]),
    ),
    num_ahead=st.sampled_from([0, 1]),
)
def test_nothing_starves_and_no_prompt_is_begun_in_vain(
    asked: list[Arrival], scheduler: Scheduler, num_ahead: int
) -> None:
    asked = sorted(asked, key=lambda arrival: arrival.step)  # uids grow with arrival
    groups = [arrival.group(uid) for uid, arrival in enumerate(asked)]
    oracle = PagedOracle(scheduler, num_ahead)
    begun: list[Request] = []
    passed_over = note_passed_over(scheduler)
    for step in range(3000):
        for group, arrival in zip(groups, asked, strict=True):
            if arrival.step == step:
                scheduler.add(group)
        if step > 15 and not oracle.has_work():
            break
        running = list(scheduler.running)
        num_preemptions = [request.num_preemptions for request in running]
        num_blocks_before = [request.kv.num_blocks for request in running]
        was_new = [group[0] for group in groups if group[0].times.first_scheduled is None]
        in_prefill = [
            request.num_computed_tokens < request.num_prompt_tokens for request in running
        ]
        oracle.step()
        begun += [r for r in was_new if r.times.first_scheduled is not None]
        decode_needed_blocks = any(
            request.kv.num_blocks != before and not prefill
            for request, before, prefill in zip(running, num_blocks_before, in_prefill, strict=True)
        )
        for request, count, prefill in zip(running, num_preemptions, in_prefill, strict=True):
            if prefill and request.num_preemptions > count:
                assert decode_needed_blocks
    else:
        raise AssertionError("somebody starves")
    if scheduler.policy == "fcfs" and not scheduler._admission._threshold:
        assert {request.uid for request in begun} == set(range(len(groups)))
        # Who waits for the prefix of a running one is in nobody's way.
        in_order = [request.uid for request in begun if request not in passed_over]
        assert in_order == sorted(in_order)
    for group in groups:
        for request in group:
            check_output(request)
