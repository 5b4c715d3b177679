"""Whatever is wrong with one request ends that request only."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.output_builder import OutputBuilder
from engine.core.request import Request
from engine.errors import TridentError
from engine.protocol.messages import AddRequest, RequestFailed, SequenceOutput
from engine.protocol.token_ids import pack_token_ids
from engine.text.byte_sets import ALL_BYTES
from engine.text.tokenizer import Tokenizer
from tests.engine.text.other_decoders import panicking_tokenizer
from tests.factories.outputs import listed
from tests.factories.tokenizers import save_tokenizer

MakeCore = Callable[..., EngineCore]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_OPEN_BYTES = {"byte E4": "ä", "bytes F0 9F": "ðŁ"}  # as the byte-level vocabulary spells them


@pytest.fixture(params=[False, True], ids=["step-by-step", "one-step-ahead"])
def make_core(checkpoint: Path, request: pytest.FixtureRequest) -> MakeCore:
    fields = {"model": str(checkpoint), "dtype": "float32", "async_scheduling": request.param}
    return lambda **settings: EngineCore(EngineConfig.parse({**fields, **settings}))


@pytest.fixture(params=_OPEN_BYTES.values(), ids=_OPEN_BYTES)
def open_prompt(checkpoint: Path, request: pytest.FixtureRequest) -> list[int]:
    """A prompt that ends inside a UTF-8 character."""
    convert = Tokenizer.from_pretrained(checkpoint).hf_tokenizer.convert_tokens_to_ids
    return [*range(5, 45), *(convert(character) for character in request.param)]


def stopping_at_replacement(uid: int, prompt: list[int], **fields: object) -> AddRequest:
    params = {"max_tokens": 9, "temperature": 0, "ignore_eos": True, "stop": [_REPLACEMENT]}
    return AddRequest(uid, pack_token_ids(prompt), {**params, **fields})


def plain(uid: int, **fields: object) -> AddRequest:
    params = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
    return AddRequest(uid, pack_token_ids([5, 6, 7]), {**params, **fields})


def run(core: EngineCore) -> list[SequenceOutput | RequestFailed]:
    produced = []
    while core.has_unfinished_requests():
        produced += listed(core.step())
    core.check_integrity()
    assert core.scheduler.kv_cache.pool.num_free == core.scheduler.kv_cache.pool.num_usable
    return produced


def tokens(produced: list[SequenceOutput | RequestFailed], uid: int, index: int = 0) -> list[int]:
    return [
        token_id
        for output in produced
        if isinstance(output, SequenceOutput) and (output.uid, output.index) == (uid, index)
        for token_id in output.token_ids
    ]


@pytest.mark.parametrize("num_steps", [0, 1, 2], ids=["queued", "in prefill", "later in prefill"])
def test_an_abort_before_the_first_token_is_never_a_stop_string(
    make_core: MakeCore, open_prompt: list[int], num_steps: int
) -> None:
    core = make_core(max_num_batched_tokens=16, max_num_seqs=2)
    core.add_request(stopping_at_replacement(1, open_prompt, n=2))
    for _ in range(num_steps):
        assert listed(core.step()) == []
    outputs = listed(core.abort(1))
    assert len(outputs) == 2
    for output in outputs:
        assert isinstance(output, SequenceOutput)
        assert (output.finish_reason, output.stop_reason) == ("abort", None)
        assert (output.token_ids, output.text_cut) == ([], 0)
    assert run(core) == []
    assert core.take_stats().num_finished == {"abort": 2}


def test_a_deadline_before_the_first_token_is_never_a_stop_string(
    make_core: MakeCore, open_prompt: list[int]
) -> None:
    core = make_core()
    late = stopping_at_replacement(1, open_prompt)
    core.add_request(
        AddRequest(
            1,
            late.prompt_token_ids,
            late.sampling_params,
            arrival_time=time.monotonic() - 2,
            timeout_s=1,
        )
    )
    core.add_request(plain(2))
    produced = run(core)
    (aborted,) = [output for output in produced if output.uid == 1]
    assert isinstance(aborted, SequenceOutput)
    assert (aborted.finish_reason, aborted.text_cut) == ("abort", 0)
    assert len(tokens(produced, 2)) == 9


def test_an_abort_is_never_promoted_by_text_that_was_held_back(
    make_core: MakeCore, open_prompt: list[int]
) -> None:
    core = make_core()
    opening = open_prompt[40]
    core.add_request(stopping_at_replacement(1, [5], allowed_token_ids=[opening], max_tokens=1))
    (ended,) = run(core)
    assert isinstance(ended, SequenceOutput)
    assert (ended.finish_reason, ended.stop_reason) == ("stop", _REPLACEMENT)

    core.add_request(stopping_at_replacement(2, [5], allowed_token_ids=[opening], max_tokens=5))
    (sequence,) = core.scheduler.waiting.queued
    while sequence.num_output_tokens == 0:
        core.step()
    (aborted,) = listed(core.abort(2))
    assert isinstance(aborted, SequenceOutput)
    assert (aborted.finish_reason, aborted.stop_reason) == ("abort", None)
    assert aborted.text_cut == 0
    assert run(core) == []


def test_text_that_the_prompt_alone_brought_is_no_stop_string(
    make_core: MakeCore, open_prompt: list[int]
) -> None:
    """The replacement character of the prompt's incomplete one is part of the output's text."""
    core = make_core()
    letter = core.tokenizer.encode("x")[0]
    core.add_request(stopping_at_replacement(1, open_prompt, allowed_token_ids=[letter]))
    produced = run(core)
    last = produced[-1]
    assert isinstance(last, SequenceOutput)
    assert last.finish_reason == "length"
    assert tokens(produced, 1) == [letter] * 9


@pytest.mark.parametrize("stop", [[], ["x"]])
def test_a_request_whose_tokens_make_the_decoder_panic_fails_alone(
    make_core: MakeCore, tmp_path: Path, stop: list[str]
) -> None:
    core = make_core(tokenizer=str(save_tokenizer(panicking_tokenizer(), tmp_path)))
    only_spaces = {"allowed_token_ids": [1], "stop": stop, "max_tokens": 40}
    core.add_request(AddRequest(1, pack_token_ids([2]), only_spaces))
    core.add_request(plain(2, stop=stop, allowed_token_ids=[2]))
    produced = run(core)
    (failed,) = [each for each in produced if isinstance(each, RequestFailed)]
    assert (failed.uid, failed.error.code) == (1, "internal")
    assert "the tokenizer cannot decode" in failed.error.message
    assert tokens(produced, 2) == [2] * 9


class BrokenStopChecker:
    """Raises at the third token, as a defect of a tokenizer would make it."""

    match = None
    num_held_tokens = 0
    num_tokens = 0
    watch = ALL_BYTES

    def skip(self, num_tokens: int) -> None:
        assert num_tokens == 0

    def append(self, token_id: int) -> None:
        self.num_tokens += 1
        if self.num_tokens == 3:
            raise ValueError("this decoder is broken")


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_whose_text_cannot_be_made_fails_alone(make_core: MakeCore, n: int) -> None:
    core = make_core()
    core.add_request(plain(1, n=n, stop=["x"]))
    (first,) = core.scheduler.waiting.queued
    first.output.stop_checker = BrokenStopChecker()  # type: ignore[assignment]
    core.add_request(plain(2))
    produced = run(core)
    (failed,) = [each for each in produced if isinstance(each, RequestFailed)]
    assert failed == RequestFailed(1, TridentError("internal error").report())
    assert [each.uid for each in produced[produced.index(failed) + 1 :]].count(1) == 0
    assert len(tokens(produced, 1)) == 2
    assert len(tokens(produced, 2)) == 9
    finished = core.take_stats().num_finished
    assert finished["error"] == 1
    assert sum(finished.values()) == n + 1


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_whose_output_cannot_be_built_fails_alone(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    core = make_core()
    core.add_request(plain(1, n=n))
    (first,) = core.scheduler.waiting.queued
    core.add_request(plain(2))
    first.output.window_ids = [5, 6]  # else it is part of the columns, where nothing can fail

    window_after = OutputBuilder._window_after

    def broken(self: OutputBuilder, request: Request, *window: list[int]) -> list[int]:
        if request.uid == 1:
            raise ValueError("this decoder is broken")
        return window_after(self, request, *window)

    monkeypatch.setattr(OutputBuilder, "_window_after", broken)
    produced = run(core)
    (failed,) = [each for each in produced if isinstance(each, RequestFailed)]
    assert (failed.uid, failed.error.message) == (1, "internal error")
    assert len(tokens(produced, 2)) == 9
    finished = core.take_stats().num_finished
    assert sum(finished.values()) == n + 1


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_request_that_cannot_be_aborted_in_order_is_gone_all_the_same(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    def broken(self: object, request: Request) -> None:
        raise RuntimeError("no output can be built")

    core = make_core()
    core.add_request(plain(1, n=2))
    core.add_request(plain(2))
    for _ in range(num_steps):
        core.step()
    with monkeypatch.context() as patch:
        patch.setattr("engine.core.output_builder.OutputBuilder.build", broken)
        assert listed(core.abort(1)) == [RequestFailed(1, TridentError("internal error").report())]
    assert tokens(run(core), 1) == []


def test_a_request_that_fails_as_it_is_added_leaves_nothing(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()

    def broken(self: object, siblings: list[Request]) -> None:
        raise RuntimeError("no room in the histogram")

    with monkeypatch.context() as patch:
        patch.setattr("engine.core.stats.StatsRecorder.accepted", broken)
        with pytest.raises(RuntimeError):
            core.add_request(plain(1))
    assert not core.has_unfinished_requests()
    core.add_request(plain(2))
    assert len(tokens(run(core), 2)) == 9


EXTREMES: list[dict[str, object]] = [
    *({"temperature": value} for value in (1e-320, 1e-45, 3.4e38, 1.7e308)),
    *({"repetition_penalty": value} for value in (5e-324, 1e-45, 3.5e38, 1.7e308)),
    *({"temperature": 1, "top_p": value} for value in (5e-324, 1e-30)),
    {"temperature": 1, "top_k": 2**31 - 1, "min_p": 1.0},
    {"seed": 2**64 - 1, "n": 3, "temperature": 1},
    *({"logit_bias": dict.fromkeys(range(400), value)} for value in (-100, 100)),
    {"logit_bias": {3: 100, 4: -100}, "temperature": 1e-300, "logprobs": 5},
    {"temperature": 1, "top_n_sigma": 1e308, "typical_p": 5e-324},
    {"dry_multiplier": 1.7e308, "dry_base": 1.7e308, "dry_allowed_length": 0},
    {"dry_multiplier": 1, "dry_penalty_last_n": 1, "dry_sequence_breakers": ["\x00", "é" * 40]},
    {"allowed_token_ids": [3], "logit_bias": {3: -100}, "bad_words": ["a"]},
    {"min_tokens": 9, "stop_token_ids": list(range(400)), "logprobs": 0},
    {"bad_words": ["\x00", "\N{REPLACEMENT CHARACTER}", " ", "ab" * 500]},
    {"stop": ["\x00", "\N{REPLACEMENT CHARACTER}", "ab" * 500], "skip_special_tokens": False},
    {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e-300},
]


def test_extreme_parameters_end_no_step(make_core: MakeCore) -> None:
    core = make_core()
    for uid, extreme in enumerate(EXTREMES):
        core.add_request(plain(uid, **extreme))
    produced = run(core)
    assert all(isinstance(each, SequenceOutput) for each in produced)
    for uid in range(len(EXTREMES)):
        assert tokens(produced, uid)
