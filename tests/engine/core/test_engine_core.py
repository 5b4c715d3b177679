"""What the engine hands out step by step."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import CheckpointError, ConfigError, QueueFullError, RequestError
from engine.protocol import AddRequest, SequenceOutput
from engine.token_ids import pack_token_ids
from tests.factories.outputs import listed

MakeCore = Callable[..., EngineCore]
SHORT = pack_token_ids([5, 6])


@pytest.fixture(params=[False, True], ids=["step-by-step", "one-step-ahead"])
def make_core(checkpoint: Path, request: pytest.FixtureRequest) -> MakeCore:
    fields = {"model": str(checkpoint), "dtype": "float32", "async_scheduling": request.param}
    return lambda **settings: EngineCore(EngineConfig.parse({**fields, **settings}))


def request(uid: int, max_tokens: int = 9, **fields: object) -> AddRequest:
    params = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return AddRequest(uid, pack_token_ids([5, 6, 7]), {**params, **fields})


def run(core: EngineCore) -> list[SequenceOutput]:
    outputs = []
    while core.has_unfinished_requests():
        outputs += listed(core.step())
    core.check_integrity()
    return outputs


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 9), (4, [1, 4, 4]), (20, [1, 8])])
def test_chunks_have_the_streams_interval_but_the_first_token_comes_at_once(
    make_core: MakeCore, interval: int, sizes: list[int]
) -> None:
    core = make_core(stream_interval=interval)
    core.add_request(request(1))
    assert [len(output.token_ids) for output in run(core)] == sizes


def test_without_streaming_everything_comes_at_the_end(make_core: MakeCore) -> None:
    core = make_core()
    streamed, whole = request(1), request(2)
    core.add_request(streamed)
    core.add_request(AddRequest(2, whole.prompt_token_ids, whole.sampling_params, stream=False))
    outputs = run(core)
    (answer,) = [output for output in outputs if output.uid == 2]
    assert answer.token_ids == [i for o in outputs if o.uid == 1 for i in o.token_ids]


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


@pytest.mark.parametrize("uid", [1, 2])
def test_a_deadline_is_answered_before_the_next_step(make_core: MakeCore, uid: int) -> None:
    """Whether the request runs or waits; it counts from arrival, wherever the request was then."""
    core = make_core(max_num_seqs=1)
    begin = time.monotonic()
    for each in (1, 2):
        late = {"arrival_time": begin - 9.8, "timeout_s": 10.0} if each == uid else {}
        core.add_request(AddRequest(each, SHORT, {"max_tokens": 99, "ignore_eos": True}, **late))
    core.step()
    time.sleep(max(0.0, begin + 0.21 - time.monotonic()))
    (output,) = listed(core.step())
    assert (output.uid, output.finish_reason) == (uid, "abort")
    other = 3 - uid
    core.abort(other)
    assert run(core) == []
    assert core.scheduler.kv_cache.pool.num_free == core.scheduler.kv_cache.pool.num_usable


def test_the_timeout_of_the_settings_holds_for_all_and_none_may_exceed_it(
    make_core: MakeCore,
) -> None:
    core = make_core(request_timeout_s=5)
    arrival = time.monotonic() - 4
    for uid, timeout_s, age in ((1, None, 0), (2, 100.0, 0), (3, 3.0, 0), (4, None, 2)):
        core.add_request(
            AddRequest(
                uid,
                SHORT,
                {"max_tokens": 4, "ignore_eos": True},
                arrival_time=arrival - age,
                timeout_s=timeout_s,
            )
        )
    finished = {o.uid: o.finish_reason for o in run(core) if o.finish_reason is not None}
    assert finished == {1: "length", 2: "length", 3: "abort", 4: "abort"}


def test_a_deadline_ends_what_waits_and_what_runs(make_core: MakeCore) -> None:
    core = make_core(max_num_seqs=1)
    params = {"max_tokens": 100, "ignore_eos": True}
    for uid in (1, 2):
        core.add_request(AddRequest(uid, SHORT, params, timeout_s=0.2))
    core.add_request(request(3))
    core.step()
    time.sleep(0.25)
    finished = {o.uid: o.finish_reason for o in run(core) if o.finish_reason is not None}
    assert finished == {1: "abort", 2: "abort", 3: "length"}


def test_an_end_token_that_the_model_does_not_have_is_refused_at_the_start(
    checkpoint: Path, tmp_path: Path, make_core: MakeCore
) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "generation_config.json").write_text('{"eos_token_id": [0, 400]}')
    with pytest.raises(CheckpointError, match=r"eos_token_id: 400 must be below .* 400$"):
        make_core(model=str(broken))


def test_statistics_of_a_request(make_core: MakeCore) -> None:
    core = make_core(block_size=4)
    prompt = list(range(10, 30))
    for uid in (1, 2):
        params = {"max_tokens": 3, "ignore_eos": True}
        core.add_request(AddRequest(uid, pack_token_ids(prompt), params))
        (stats,) = [output.stats for output in run(core) if output.stats is not None]
        assert (stats.num_prompt_tokens, stats.num_output_tokens) == (20, 3)
        assert stats.num_cached_tokens == (16 if uid == 2 else 0)
        times = [
            stats.arrival_time,
            stats.first_scheduled_time,
            stats.first_token_time,
            stats.finished_time,
        ]
        assert times == sorted(times)


def test_equal_prompts_of_one_step_share_blocks_and_answer_alike(make_core: MakeCore) -> None:
    """The second reads KV that the first writes in the same step."""
    prompt = list(range(10, 43))
    params = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    alone = make_core(block_size=4)
    alone.add_request(AddRequest(1, pack_token_ids(prompt), params, stream=False))
    (expected,) = run(alone)
    core = make_core(block_size=4)
    for uid, ids in ((1, prompt), (2, prompt), (3, [*prompt[:32], 7])):
        core.add_request(AddRequest(uid, pack_token_ids(ids), params, stream=False))
    outputs = {output.uid: output for output in run(core)}
    assert outputs[1].token_ids == outputs[2].token_ids == expected.token_ids
    cached = {uid: o.stats.num_cached_tokens for uid, o in outputs.items() if o.stats is not None}
    assert cached == {1: 0, 2: 32, 3: 32}


def test_tokens_without_text_leave_the_window_short(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(
        AddRequest(1, SHORT, {"max_tokens": 120, "allowed_token_ids": [1], "ignore_eos": True})
    )
    outputs = run(core)
    assert [len(output.token_ids) for output in outputs] == [1] * 120
    assert max(len(output.window_ids) for output in outputs) <= 16


def test_logprobs_are_kept_until_they_are_handed_out(make_core: MakeCore) -> None:
    core = make_core(stream_interval=3)
    core.add_request(request(1, logprobs=2))
    (sequence,) = core.scheduler.waiting.queued
    outputs = []
    while core.has_unfinished_requests():
        outputs += listed(core.step())
        assert len(sequence.output.logprobs) < 3
    for output in outputs:
        assert output.logprobs is not None
        assert [entry.token_ids[0] for entry in output.logprobs] == output.token_ids


def test_a_salt_that_cannot_be_hashed_is_refused_before_it_reaches_the_scheduler(
    make_core: MakeCore,
) -> None:
    core = make_core()
    with pytest.raises(RequestError, match=r"^cache_salt: is not valid Unicode"):
        core.add_request(
            AddRequest(1, pack_token_ids([5] * 40), {"max_tokens": 2}, cache_salt="\ud800")
        )
    core.add_request(request(2))
    assert {output.uid for output in run(core)} == {2}


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


def test_a_full_queue_refuses_the_lowest_priority_first(make_core: MakeCore) -> None:
    core = make_core(max_num_seqs=1, max_num_queued_reqs=3, scheduling_policy="priority")
    for uid, priority in ((1, 9), (2, 3), (3, 5), (4, 5)):  # the first has a slot
        assert core.add_request(prioritised(uid, priority)) == []
        if uid == 1:
            core.step()
    (refused,) = core.add_request(prioritised(5, 4))
    assert (refused.uid, refused.code) == (4, "UNAVAILABLE")
    assert refused.message.startswith("Maximum queue size of 3 requests or ")
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
