"""A full queue: what the engine lets in, what it refuses, and who is evicted."""

import pytest

from engine.core.engine_core import EngineCore
from engine.errors import ConfigError, QueueFullError, RequestError
from engine.protocol.messages import AddRequest, RequestFailed
from engine.protocol.token_ids import pack_token_ids
from tests.factories.cores import MakeCore, request, run

SHORT = pack_token_ids([5, 6])


def test_what_fits_into_free_slots_is_not_waiting(make_core: MakeCore) -> None:
    core = make_core(max_num_seqs=8, max_num_queued_reqs=2, max_num_queued_tokens=20)
    for uid in range(1, 9):
        core.add_request(request(uid))
    core.step()
    core.abort(1)
    for uid in range(9, 12):
        core.add_request(request(uid))
    with pytest.raises(QueueFullError, match="Maximum queue size of 2 requests"):
        core.add_request(request(12))
    assert {output.uid for output in run(core)} == set(range(2, 12))


def test_a_full_queue_refuses_the_next_one_only(make_core: MakeCore) -> None:
    core = make_core(max_num_seqs=1, max_num_queued_reqs=2)
    for uid in (1, 2, 3):
        core.add_request(request(uid))
    with pytest.raises(QueueFullError, match="Maximum queue size of 2 requests"):
        core.add_request(request(4))
    assert {output.uid for output in run(core)} == {1, 2, 3}


def test_each_sequence_of_a_request_counts_as_waiting(make_core: MakeCore) -> None:
    core = make_core(max_num_seqs=2, max_num_queued_reqs=4)
    core.add_request(AddRequest(1, SHORT, {"max_tokens": 2, "n": 4}))
    with pytest.raises(QueueFullError, match="Maximum queue size of 4 requests"):
        core.add_request(AddRequest(2, SHORT, {"max_tokens": 2, "n": 3}))
    core.add_request(AddRequest(3, SHORT, {"max_tokens": 2, "n": 2}))
    assert {output.uid for output in run(core)} == {1, 3}


def test_waiting_prompt_tokens_are_bounded_and_the_first_is_always_let_in(
    make_core: MakeCore,
) -> None:
    core = make_core(max_num_seqs=1, max_num_queued_tokens=5)
    core.add_request(request(1))
    core.add_request(AddRequest(2, pack_token_ids([5] * 20), {"max_tokens": 2}))
    with pytest.raises(QueueFullError, match="Maximum queue size of 5 prompt tokens"):
        core.add_request(request(3))
    assert {output.uid for output in run(core)} == {1, 2}


def test_a_priority_below_the_smallest_one_allowed_is_refused(make_core: MakeCore) -> None:
    core = make_core(min_priority=-2, scheduling_policy="priority")
    with pytest.raises(RequestError, match=r"^priority: must be at least -2 \(got -3\)$"):
        core.add_request(AddRequest(1, pack_token_ids([5]), {"max_tokens": 2}, priority=-3))
    core.add_request(AddRequest(2, pack_token_ids([5]), {"max_tokens": 2}, priority=-2))
    core.add_request(AddRequest(3, pack_token_ids([5]), {"max_tokens": 2}))
    assert {output.uid for output in run(core)} == {2, 3}
    with pytest.raises(ConfigError, match=r"^min_priority: .* less than or equal to 0"):
        make_core(min_priority=1)  # which would refuse all requests that bring none


def queued(core: EngineCore) -> list[int]:
    return [request.uid for request in core.scheduler.waiting.queued]


def prioritised(
    uid: int, priority: int, n: int = 1, length: int = 3, **fields: object
) -> AddRequest:
    params = {"max_tokens": 2, "ignore_eos": True, "n": n, **fields}
    return AddRequest(uid, pack_token_ids([5] * length), params, priority=priority)


def test_a_full_queue_refuses_one_of_the_tenant_that_fills_it(make_core: MakeCore) -> None:
    core = make_core(max_num_seqs=1, max_num_queued_reqs=2)

    def ask(uid: int, tenant: str) -> list[RequestFailed]:
        message = AddRequest(uid, pack_token_ids([5]), {"max_tokens": 2}, tenant=tenant)
        return core.add_request(message)

    assert ask(1, "many") == []
    core.step()
    assert [ask(uid, "many") for uid in (2, 3)] == [[], []]
    (refused,) = ask(4, "few")
    assert (refused.uid, refused.error.code) == (3, "queue_full")
    assert "took its place" in refused.error.message
    with pytest.raises(RequestError, match=r"^tenant: is not valid Unicode"):
        ask(5, "\ud800")
    assert {output.uid for output in run(core)} == {1, 2, 4}


def test_a_full_queue_refuses_the_lowest_priority_first(make_core: MakeCore) -> None:
    core = make_core(max_num_seqs=1, max_num_queued_reqs=3, scheduling_policy="priority")
    for uid, priority in ((1, 9), (2, 3), (3, 5), (4, 5)):  # the first has a slot
        assert core.add_request(prioritised(uid, priority)) == []
        if uid == 1:
            core.step()
    (refused,) = core.add_request(prioritised(5, 4))
    assert (refused.uid, refused.error.code) == (4, "queue_full")
    assert refused.error.message.startswith("Maximum queue size of 3 requests or ")
    assert queued(core) == [2, 5, 3]
    for uid, priority in ((6, 5), (7, 9)):
        with pytest.raises(QueueFullError, match="Maximum queue size of 3 requests"):
            core.add_request(prioritised(uid, priority))
    assert {output.uid for output in run(core)} == {1, 2, 3, 5}
    assert core.take_stats().num_finished["abort"] == 1


def test_as_many_are_displaced_as_are_needed_or_none(make_core: MakeCore) -> None:
    core = make_core(
        max_num_seqs=1,
        max_num_queued_reqs=4,
        max_num_queued_tokens=100,
        scheduling_policy="priority",
    )
    core.add_request(prioritised(1, 0))
    core.step()
    for uid, priority in ((2, 1), (3, 2), (4, 2), (5, 0)):
        core.add_request(prioritised(uid, priority, length=10))
    for refused in (
        prioritised(6, 1, n=4),  # the two of priority 2 are not enough
        prioritised(7, 0, length=95),  # nor are three in tokens
    ):
        with pytest.raises(QueueFullError):
            core.add_request(refused)
    with pytest.raises(RequestError, match=r"^stop_token_ids"):
        core.add_request(prioritised(8, 0, stop_token_ids=[10**6]))
    assert queued(core) == [5, 2, 3, 4]
    failed = core.add_request(prioritised(9, 0, n=2))
    assert [each.uid for each in failed] == [4, 3]
    assert queued(core) == [5, 9, 2]
    assert [each.uid for each in core.add_request(prioritised(10, 0, length=80))] == [2]
    assert {output.uid for output in run(core)} == {1, 5, 9, 10}


def test_without_priorities_nobody_is_displaced(make_core: MakeCore) -> None:
    core = make_core(max_num_seqs=1, max_num_queued_reqs=1)
    core.add_request(prioritised(1, 0))
    core.add_request(prioritised(2, 5))
    with pytest.raises(QueueFullError):
        core.add_request(prioritised(3, -5))
    assert {output.uid for output in run(core)} == {1, 2}
