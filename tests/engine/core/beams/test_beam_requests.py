"""What a request with beams hands out step by step, and what is left when it ends early."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.request import MAX_BYPASSED
from engine.errors import QueueFullError
from engine.protocol.messages import AddRequest, SequenceOutput
from engine.protocol.token_ids import pack_token_ids
from tests.factories.cores import request
from tests.factories.outputs import listed

MakeCore = Callable[..., EngineCore]


@pytest.fixture(params=[False, True], ids=["step-by-step", "one-step-ahead"])
def make_core(checkpoint: Path, request: pytest.FixtureRequest) -> MakeCore:
    fields = {
        "model": str(checkpoint),
        "dtype": "float32",
        "async_scheduling": request.param,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 8,
    }
    return lambda **settings: EngineCore(EngineConfig.parse({**fields, **settings}))


def beams(uid: int, width: int = 4, *, stream: bool = True, **fields: object) -> AddRequest:
    params = {"max_tokens": 24, "ignore_eos": True, "beam_width": width, "logprobs": 1, **fields}
    return AddRequest(uid, pack_token_ids([5, 6, 7]), params, stream=stream)


def run(core: EngineCore) -> list[SequenceOutput]:
    outputs = []
    while core.has_unfinished_requests():
        outputs += listed(core.step())
        core.check_integrity()
    core.check_idle()
    return outputs


def test_what_is_settled_is_streamed(make_core: MakeCore) -> None:
    core = make_core()
    whole = {}
    for uid, n in enumerate((1, 3), start=1):
        core.add_request(beams(uid, n=n, stream=False))
        whole[n] = run(core)
        assert [output.index for output in whole[n]] == list(range(n))
    core.add_request(beams(4))
    chunks = run(core)
    (last,) = [chunk for chunk in chunks if chunk.finish_reason is not None]
    assert chunks[-1] is last
    assert len(chunks) > 2, "nothing was settled before the end"
    (expected,) = whole[1]
    assert expected.token_ids == whole[3][0].token_ids
    assert [i for chunk in chunks for i in chunk.token_ids] == expected.token_ids
    assert [p for chunk in chunks for p in chunk.logprobs or ()] == expected.logprobs
    assert last.cumulative_logprob == expected.cumulative_logprob
    core.add_request(beams(5, n=3))
    assert [(o.index, o.token_ids) for o in run(core)] == [
        (o.index, o.token_ids) for o in whole[3]
    ], "with several outputs nothing is streamed"


def test_an_aborted_search_hands_out_the_best_so_far(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(beams(1))
    core.add_request(beams(2, n=2))
    streamed: list[int] = []
    for _ in range(20):
        streamed += [i for output in listed(core.step()) for i in output.token_ids]
    assert streamed
    outputs = {uid: listed(core.abort(uid)) for uid in (1, 2)}
    assert [output.finish_reason for each in outputs.values() for output in each] == ["abort"] * 3
    (last,) = outputs[1]
    first, second = outputs[2]
    assert streamed + last.token_ids == first.token_ids
    assert first.token_ids != second.token_ids
    assert first.cumulative_logprob is not None
    assert second.cumulative_logprob is not None
    assert first.cumulative_logprob > second.cumulative_logprob
    assert run(core) == []


@pytest.mark.parametrize("num_steps", range(4))
def test_a_search_may_be_aborted_at_any_time(make_core: MakeCore, num_steps: int) -> None:
    core = make_core(num_gpu_blocks_override=20, max_num_batched_tokens=8)
    for uid in (1, 2, 3):
        core.add_request(beams(uid, n=2))
    for _ in range(num_steps):
        core.step()
    for uid in (2, 1, 3):
        assert len(listed(core.abort(uid))) == 2
        core.check_integrity()
    assert run(core) == []


def test_a_deadline_ends_it(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(
        AddRequest(1, pack_token_ids([5]), {"max_tokens": 50, "beam_width": 3}, timeout_s=0.0)
    )
    (output,) = run(core)
    assert output.finish_reason == "abort"


def test_all_beams_count_as_waiting(make_core: MakeCore) -> None:
    core = make_core(max_num_seqs=2, max_num_queued_reqs=4)
    core.add_request(beams(1, max_tokens=2))
    with pytest.raises(QueueFullError, match="Maximum queue size of 4 requests"):
        core.add_request(beams(2, width=3, max_tokens=2))
    core.add_request(beams(3, width=2, max_tokens=2))
    assert {output.uid for output in run(core)} == {1, 3}


def test_blocks_of_what_beams_share_are_counted_once(make_core: MakeCore) -> None:
    core = make_core()
    prompt = pack_token_ids(range(1, 41))  # ten blocks
    core.add_request(AddRequest(1, prompt, {"max_tokens": 12, "beam_width": 8}))
    pool, most = core.scheduler.kv_cache.pool, 0
    while core.has_unfinished_requests():
        core.step()
        most = max(most, pool.num_usable - pool.num_free)
    assert 10 + 8 <= most <= 10 + 8 * 3
    core.check_idle()


def test_bad_words_and_penalties_apply_to_beams(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(beams(1, stream=False, n=4))
    plain = run(core)
    words = {token_id: core.tokenizer.token_text(token_id) for token_id in plain[0].token_ids}
    token_id, word = next(
        (token_id, word)
        for token_id, word in words.items()
        if core.tokenizer.encode(word, add_special_tokens=False) == [token_id]
    )
    core.add_request(beams(2, stream=False, n=4, bad_words=[word], frequency_penalty=1.5))
    for output in run(core):
        assert token_id not in output.token_ids
        assert output.logprobs is not None
        assert all(len(token.token_ids) == 2 for token in output.logprobs)


def test_best_of_is_not_streamed(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(beams(2, width=1, best_of=3))
    for _ in range(5):
        assert listed(core.step()) == []
    (output,) = listed(core.abort(2))
    assert (output.index, output.finish_reason) == (0, "abort")
    assert run(core) == []


def test_step_beams_that_need_all_blocks_beside_endless_traffic_are_answered(
    make_core: MakeCore,
) -> None:
    """Requests of every kind and of other tenants come whenever one has finished."""
    core = make_core(block_size=16, num_gpu_blocks_override=1 + 16, max_num_seqs=16)
    search, max_tokens = 0, 24  # with the prompt two blocks of each beam
    kinds: list[dict[str, object]] = [
        {},
        {"n": 2},
        {"structured_outputs": {"regex": "[a-z ]{5}"}},
        {"temperature": 1.0},
    ]
    others: list[int] = []
    finished: set[int] = set()

    def step() -> None:
        outputs = core.step()
        assert not outputs.failures
        finished.update(each.uid for each in listed(outputs) if each.finish_reason)

    def fill() -> None:
        while len(others) - len(finished - {search}) < 12:
            uid = len(others) + 1
            others.append(uid)
            asked = request(uid, 4 + uid % 9, **kinds[uid % len(kinds)])
            core.add_request(replace(asked, tenant=f"tenant {uid % 5}"))

    fill()
    step()
    core.add_request(beams(search, 8, n=8, max_tokens=max_tokens))
    num_steps = 0
    while search not in finished:
        step()
        fill()
        num_steps += 1
        assert num_steps < max_tokens + 4 * MAX_BYPASSED
    while core.has_unfinished_requests():
        step()
    assert finished == {search, *others}
    core.check_integrity()
    core.check_idle()
