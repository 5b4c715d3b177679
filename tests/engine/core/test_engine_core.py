"""What the engine hands out step by step."""

import shutil
import time
from pathlib import Path

import pytest

from engine.errors import CheckpointError, RequestError
from engine.protocol.messages import AddRequest
from engine.protocol.token_ids import pack_token_ids
from tests.factories.cores import MakeCore, request, run
from tests.factories.outputs import listed

SHORT = pack_token_ids([5, 6])


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
    with pytest.raises(CheckpointError, match=r"eos_token_id: must be below .* \(got 400\)$"):
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
