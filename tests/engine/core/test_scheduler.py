"""Which requests a step takes, and what becomes of them, by example."""

import pytest

from engine.core.constraints.bad_words import BadWords
from engine.core.schedule import SchedulerOutput
from engine.core.scheduler import Scheduler, check_integrity
from tests.factories.paged_oracle import PagedOracle, check_output, expected_output
from tests.factories.requests import StopString, make_request, make_scheduler


def uids_of(scheduler: Scheduler, schedule: SchedulerOutput) -> list[int]:
    uids = {request.slot: request.uid for request in scheduler.running}
    return [uids[slot] for slot in schedule.slots.tolist()]


def scheduled(scheduler: Scheduler) -> list[tuple[int, int]]:
    schedule = scheduler.schedule()
    return list(zip(uids_of(scheduler, schedule), schedule.num_tokens.tolist(), strict=True))


def test_a_prompt_is_split_over_steps_and_shares_them_with_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    oracle = PagedOracle(scheduler)
    scheduler.add([make_request(1, range(3))])
    oracle.step()
    scheduler.add([make_request(2, range(100, 120))])
    steps = []
    for _ in range(3):
        schedule = scheduler.schedule()
        uids = uids_of(scheduler, schedule)
        steps.append(list(zip(uids, schedule.num_tokens.tolist(), strict=True)))
        scheduler.update(oracle.execute(schedule))
    assert steps == [[(1, 1), (2, 7)], [(1, 1), (2, 7)], [(1, 1), (2, 6)]]


def test_a_long_prefill_ahead_never_starves_the_decodes_behind_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, num_blocks=64)
    oracle = PagedOracle(scheduler)
    scheduler.add([make_request(5, range(3), max_tokens=30)])
    oracle.step()
    scheduler.add([make_request(1, range(100, 140))])  # runs ahead of 5
    oracle.step()
    # Rows of one token come first.
    assert scheduled(scheduler) == [(5, 1), (1, 7)]


def test_the_long_prefill_threshold_leaves_room_for_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, long_prefill_token_threshold=4)
    scheduler.add([make_request(1, range(20))])
    scheduler.add([make_request(2, range(30, 33))])
    # Rows that want a token come first.
    assert scheduled(scheduler) == [(2, 3), (1, 4)]


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, enable_chunked_prefill=False)
    scheduler.add([make_request(1, range(5))])
    scheduler.add([make_request(2, range(10, 15))])
    assert scheduled(scheduler) == [(1, 5)]


def test_the_last_one_is_preempted_and_finishes_all_the_same() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=4)
    oracle = PagedOracle(scheduler)
    first = make_request(1, range(7), max_tokens=8)
    second = make_request(2, range(20, 27), max_tokens=8)
    scheduler.add([first])
    scheduler.add([second])
    assert [request.uid for request in oracle.run()] == [1, 2]
    assert scheduler.num_preemptions > 0
    assert first.num_preemptions == 0
    assert second.num_preemptions > 0
    assert second.token_ids[7:].tolist() == expected_output(range(20, 27), 8)


def test_priority_goes_first_and_is_preempted_last() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    oracle = PagedOracle(scheduler)
    scheduler.add([make_request(1, range(4), priority=5)])
    scheduler.add([make_request(2, range(4), priority=-1)])
    assert [request.uid for request in oracle.run()] == [2, 1]


def test_samples_share_the_prompt_blocks() -> None:
    scheduler = make_scheduler(num_blocks=32)
    oracle = PagedOracle(scheduler)
    prompt = list(range(14))
    group = [make_request(1, prompt, index=i, max_tokens=3) for i in range(4)]
    scheduler.add(group)
    oracle.step()
    oracle.step()
    # 14 tokens are 3 shared blocks and a last one that each sequence has for itself.
    used = scheduler.kv_cache.pool.num_usable - scheduler.kv_cache.pool.num_free
    assert used == 3 + 4
    oracle.run()
    for request in group:
        check_output(request)


def test_abort_frees_at_once_whatever_the_state() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    oracle = PagedOracle(scheduler)
    scheduler.add([make_request(1, range(6), index=i) for i in range(3)])
    scheduler.add([make_request(2, range(6))])
    assert [r.finish_reason for r in scheduler.abort(2)] == ["abort"]
    oracle.step()
    assert len(scheduler.abort(1)) == 3
    assert not scheduler.unfinished
    assert scheduler.kv_cache.pool.num_free == scheduler.kv_cache.pool.num_usable
    assert scheduler.abort(99) == []


def test_abort_before_the_fork_takes_the_siblings_along() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    oracle = PagedOracle(scheduler)
    scheduler.add([make_request(1, range(6), index=i) for i in range(3)])
    oracle.step()
    assert len(scheduler.abort(1)) == 3
    check_integrity(scheduler)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_sequence_ends_by_stop_token_or_length(reason: str) -> None:
    prompt = list(range(5))
    output = expected_output(prompt, 4)
    stop = frozenset(output[2:3]) if reason == "stop" else frozenset()
    scheduler = make_scheduler()
    request = make_request(1, prompt, max_tokens=4, stop_token_ids=stop)
    scheduler.add([request])
    PagedOracle(scheduler).run()
    assert request.finish_reason == reason
    assert request.token_ids[5:].tolist() == output[: 3 if reason == "stop" else 4]


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_the_next_turn_finds_the_blocks_of_prompt_and_answer(num_ahead: int) -> None:
    scheduler = make_scheduler()
    oracle = PagedOracle(scheduler, num_ahead)
    first = make_request(1, range(5), max_tokens=12)
    scheduler.add([first])
    oracle.run()
    # 17 tokens, of which the last was never computed; then the next turn's own.
    second = make_request(2, [*first.token_ids, 40, 41], max_tokens=1)
    scheduler.add([second])
    oracle.run()
    assert second.num_cached_tokens == 16


def test_one_step_ahead_only_the_last_step_is_wasted() -> None:
    scheduler = make_scheduler()
    oracle = PagedOracle(scheduler, num_ahead=1)
    prompt = list(range(5))
    output = expected_output(prompt, 6)
    by_length = make_request(1, prompt, max_tokens=6)
    by_token = make_request(2, prompt, max_tokens=9, stop_token_ids=frozenset(output[3:4]))
    by_string = make_request(3, prompt, max_tokens=9)
    by_string.output.stop_checker = StopString(output[2])  # type: ignore[assignment]
    for request in (by_length, by_token, by_string):
        scheduler.add([request])
    oracle.run()
    assert [r.token_ids[5:].tolist() for r in (by_length, by_token, by_string)] == [
        output,
        output[: 1 + output.index(output[3])],
        output[: 1 + output.index(output[2])],
    ]
    # The device itself ends the first two; of these, the host knows the length in advance.
    assert oracle.num_wasted_rows == 1


def test_one_step_ahead_a_token_is_never_in_flight_twice_where_the_host_must_read_it() -> None:
    scheduler = make_scheduler()
    oracle = PagedOracle(scheduler, num_ahead=1)
    bound = make_request(1, range(5), max_tokens=5)
    bound.bad_words = BadWords([[1]])
    scheduler.add([bound])
    scheduler.add([make_request(2, range(20, 25), max_tokens=9)])
    steps = []
    while oracle.has_work():
        before = len(bound.token_ids)
        schedule = scheduler.schedule()
        steps.append(uids_of(scheduler, schedule))
        if bound.uid in steps[-1]:
            assert scheduler.slots.num_unread_tokens[bound.slot] == 1
            assert len(bound.token_ids) == before
        if schedule.num_rows:
            oracle.in_flight.append(oracle.execute(schedule))
        while len(oracle.in_flight) > bool(schedule.num_rows):
            scheduler.update(oracle.in_flight.popleft())
    # It runs in every second step, and keeps nobody else waiting.
    assert steps[:9] == [[1, 2], [2]] * 4 + [[1, 2]]
    assert bound.token_ids[5:].tolist() == expected_output(range(5), 5)
