"""Preempted sequences whose KV waits in the host's memory."""

import pytest

from engine.core.constraints.bad_words import BadWords
from engine.core.kv.kv_cache_manager import BlockCopy, KVCacheManager
from engine.core.request import Request
from engine.core.scheduler import Scheduler, check_idle, check_integrity
from tests.factories.paged_oracle import PagedOracle, check_output, expected_output
from tests.factories.requests import append_tokens, make_request, make_scheduler, reuse_prefix

PROMPTS = (range(7), range(20, 27))
MAX_TOKENS = 8


def make_pair(scheduler: Scheduler, stop_token_ids: frozenset[int] = frozenset()) -> list[Request]:
    """Add two requests that fill 8 blocks in the end, of which there are 6."""
    requests = [
        make_request(uid, prompt, max_tokens=MAX_TOKENS, stop_token_ids=stop_token_ids)
        for uid, prompt in enumerate(PROMPTS)
    ]
    for request in requests:
        scheduler.add([request])
    return requests


def run_until_preemption(oracle: PagedOracle) -> None:
    for _ in range(30):
        oracle.step()
        if oracle.scheduler.num_preemptions:
            return
    raise AssertionError("there is room for all")


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
def test_what_is_swapped_out_is_not_computed_again(num_ahead: int, caching: bool) -> None:
    scheduler = make_scheduler(num_blocks=7, num_host_blocks=4, enable_prefix_caching=caching)
    oracle = PagedOracle(scheduler, num_ahead)
    requests = make_pair(scheduler)
    oracle.run()
    for request in requests:
        check_output(request)
    assert scheduler.num_preemptions > 0
    # The last token of each is never computed. One step ahead, a preemption drops the token in
    # flight, and the one before it is computed again.
    num_expected = sum(r.num_tokens - 1 for r in requests) + num_ahead * scheduler.num_preemptions
    assert oracle.num_computed_tokens == num_expected
    assert oracle.blocks.num_swapped_in > 0
    check_idle(scheduler)


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_prompt_that_is_half_computed_goes_on_there(num_ahead: int) -> None:
    scheduler = make_scheduler(num_blocks=16, num_host_blocks=16, long_prefill_token_threshold=4)
    oracle = PagedOracle(scheduler, num_ahead)
    scheduler.add([make_request(5, range(3), max_tokens=20)])
    oracle.step()
    long = make_request(9, range(100, 140), max_tokens=1)
    scheduler.add([long])
    oracle.step()
    scheduler.add([make_request(1, range(60, 63), max_tokens=20)])  # runs ahead of both
    run_until_preemption(oracle)
    assert 0 < long.kv.num_swapped_tokens < long.num_prompt_tokens
    oracle.run()
    assert oracle.num_computed_tokens == (3 + 19) + 40 + (3 + 19)
    check_idle(scheduler)


def test_what_finds_no_room_is_recomputed() -> None:
    scheduler = make_scheduler(num_blocks=7, num_host_blocks=1, enable_prefix_caching=False)
    oracle = PagedOracle(scheduler)
    requests = make_pair(scheduler)
    run_until_preemption(oracle)
    assert requests[1].kv.num_swapped_tokens == requests[1].num_computed_tokens == 0
    oracle.run()
    for request in requests:
        check_output(request)
    assert oracle.blocks.num_swapped_in == 0
    assert oracle.num_computed_tokens > sum(r.num_tokens - 1 for r in requests)
    check_idle(scheduler)


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_abort_frees_what_is_swapped_out(num_ahead: int) -> None:
    scheduler = make_scheduler(num_blocks=7, num_host_blocks=4)
    oracle = PagedOracle(scheduler, num_ahead)
    requests = make_pair(scheduler)
    run_until_preemption(oracle)
    assert len(requests[1].kv.host_tables[0]) == 3
    assert scheduler.kv_cache.host_pool.num_free == 1
    scheduler.abort(1)
    assert scheduler.kv_cache.host_pool.num_free == 4
    check_integrity(scheduler)
    oracle.run()
    assert requests[0].token_ids[7:].tolist() == expected_output(PROMPTS[0], MAX_TOKENS)
    check_idle(scheduler)


def test_a_token_in_flight_is_drawn_again_after_a_preemption() -> None:
    """Even the one that ends the sequence: it has not ended before the host knows it."""

    def preempted(stop_token_ids: frozenset[int]) -> tuple[PagedOracle, Request]:
        scheduler = make_scheduler(num_blocks=7, num_host_blocks=4)
        oracle = PagedOracle(scheduler, num_ahead=1)
        requests = make_pair(scheduler)
        requests[1].stop_token_ids = stop_token_ids
        for _ in range(30):
            schedule = scheduler.schedule()
            oracle.in_flight.append(oracle.execute(schedule))
            if scheduler.num_preemptions:
                break
            if len(oracle.in_flight) > 1:
                scheduler.update(oracle.in_flight.popleft())
        return oracle, requests[1]

    _, request = preempted(frozenset())
    num_outputs = request.num_output_tokens
    assert request.kv.num_swapped_tokens == request.num_tokens - 1
    output = expected_output(PROMPTS[1], MAX_TOKENS)
    assert output[num_outputs] not in output[:num_outputs]

    oracle, request = preempted(frozenset([output[num_outputs]]))
    assert request.kv.host_tables
    result = oracle.scheduler.update(oracle.in_flight.popleft())
    assert request.uid not in [each.uid for each in result.examined]
    assert request.num_output_tokens == num_outputs
    assert oracle.run().count(request) == 1
    assert request.finish_reason == "stop"
    assert request.token_ids[request.num_prompt_tokens :].tolist() == output[: num_outputs + 1]
    check_idle(oracle.scheduler)


def test_a_step_without_rows_leaves_its_swaps_to_the_next() -> None:
    scheduler = make_scheduler(num_blocks=7, num_host_blocks=4, enable_prefix_caching=False)
    oracle = PagedOracle(scheduler, num_ahead=1)
    requests = [make_request(1, range(7), max_tokens=8), make_request(2, range(8), max_tokens=8)]
    requests[0].bad_words = BadWords([[999]])
    for request in requests:
        scheduler.add([request])
    for _ in range(5):
        oracle.step()
    # All blocks are full but for places of a sequence that must be read first.
    schedule = scheduler.schedule()
    assert schedule.num_rows == len(schedule.swap_out) == 0
    assert requests[1].kv.num_swapped_tokens == 11
    scheduler.update(oracle.in_flight.popleft())
    oracle.run()
    for request in requests:
        check_output(request)
    # The token before the one that was in flight is computed again.
    num_expected = sum(r.num_tokens - 1 for r in requests) + scheduler.num_preemptions
    assert oracle.num_computed_tokens == num_expected
    check_idle(scheduler)


def make_swapped(num_tokens: int, **settings: bool) -> tuple[KVCacheManager, Request]:
    cache = KVCacheManager(8, 4, num_host_blocks=4, **{"enable_prefix_caching": True, **settings})
    request = make_request(1, range(num_tokens + 1))
    assert cache.allocate(request, num_tokens) is not None
    request.num_computed_tokens = num_tokens
    cache.prefix_cache.commit(request, request.num_computed_tokens)
    block_ids = list(request.kv.tables[0])
    swaps = cache.swap_out(request)
    assert swaps is not None
    assert [swap.source for swap in swaps] == block_ids
    assert [swap.destination for swap in swaps] == request.kv.host_tables[0]
    assert (request.kv.tables, request.kv.num_swapped_tokens) == ([], num_tokens)
    request.num_computed_tokens = 0
    return cache, request


def test_only_blocks_that_hold_something_travel() -> None:
    cache = KVCacheManager(8, 4, enable_prefix_caching=False, num_host_blocks=4)
    request = make_request(1, range(12))
    cache.allocate(request, 12)
    request.num_computed_tokens = 5
    swaps = cache.swap_out(request)
    assert swaps is not None
    assert [swap.source for swap in swaps] == [1, 2]
    assert cache.pool.num_free == cache.pool.num_usable


def test_what_the_prefix_cache_still_has_is_not_swapped_in() -> None:
    cache, request = make_swapped(10)
    host = list(request.kv.host_tables[0])
    assert reuse_prefix(cache, request) == 8
    prefix = [list(table) for table in request.kv.tables]
    request.num_computed_tokens = request.kv.num_swapped_tokens
    assert cache.allocate(request, 1) is not None
    assert cache.swap_in(request, prefix) == [BlockCopy(host[2], request.kv.tables[0][2])]
    assert request.kv.host_tables == []
    cache.check_integrity([request])


def test_what_the_prefix_cache_has_lost_is_swapped_in() -> None:
    cache, request = make_swapped(10, enable_prefix_caching=False)
    host = list(request.kv.host_tables[0])
    assert reuse_prefix(cache, request) == 0
    request.num_computed_tokens = request.kv.num_swapped_tokens
    assert cache.allocate(request, 3) is not None
    assert len(request.kv.tables[0]) == 4
    assert cache.swap_in(request, []) == list(map(BlockCopy, host, request.kv.tables[0][:3]))
    cache.check_integrity([request])


def test_a_prefix_that_others_have_computed_further_is_taken_instead() -> None:
    cache, request = make_swapped(5)
    append_tokens(request, range(6, 14))
    other = make_request(2, request.token_ids)
    cache.allocate(other, 13)
    other.num_computed_tokens = 13
    cache.prefix_cache.commit(other, other.num_computed_tokens)
    assert reuse_prefix(cache, request) == 12
    prefix = [list(table) for table in request.kv.tables]
    request.num_computed_tokens = 12
    assert cache.allocate(request, 1) is not None
    assert cache.swap_in(request, prefix) == []
    assert cache.host_pool.num_free == 4
    cache.check_integrity([request, other])


def test_too_little_room_changes_nothing() -> None:
    cache, _ = make_swapped(10)
    request = make_request(2, range(40, 50))
    cache.allocate(request, 8)
    request.num_computed_tokens = 8
    block_ids = list(request.kv.tables[0])
    assert cache.swap_out(request) is None
    assert (request.kv.tables, request.kv.host_tables) == ([block_ids], [])
    assert cache.host_pool.num_free == 1


def test_a_lost_block_of_the_host_is_noticed() -> None:
    cache, request = make_swapped(10)
    cache.check_integrity([request])
    with pytest.raises(AssertionError):
        cache.check_integrity([])
    request.kv.host_tables[0][0] = request.kv.host_tables[0][1]
    with pytest.raises(AssertionError):
        cache.check_integrity([request])
