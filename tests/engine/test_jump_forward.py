"""Tokens that a grammar leaves no choice about are taken without a step each, and are the same."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.core.request import Request
from engine.errors import RequestError
from engine.offline.outputs import RequestOutput
from engine.text.tokenizer import Tokenizer
from tests.factories.steps import steps_of
from tests.factories.tokenizers import byte_level_tokenizer

# Long names: most of a document is forced.
SCHEMA = {
    "type": "object",
    "properties": {
        "the quick brown fox": {"type": "boolean"},
        "jumps over the lazy dog": {"enum": ["stop here", "and here again"]},
        "nothing else can come": {"const": "Stop here, and here again!"},
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": [
        *("the quick brown fox", "jumps over the lazy dog", "nothing else can come", "number")
    ],
    "additionalProperties": False,
}
DOCUMENT = {"structured_outputs": {"json": SCHEMA}}
_SPACES = [Tokenizer(byte_level_tokenizer()).encode(each)[0] for each in " \n\r\t"]


@pytest.fixture(scope="module", params=["step-by-step", "one-step-ahead", "deterministic", "tight"])
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> LLM:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_num_seqs": 8}
    settings["async_scheduling"] = request.param in ("one-step-ahead", "tight")
    if request.param == "deterministic":
        settings["deterministic"] = True
    if request.param == "tight":  # chunks are cut, and sequences preempted
        settings |= {"num_gpu_blocks_override": 120, "max_num_batched_tokens": 16}
    return LLM(str(checkpoint), **settings)


@pytest.fixture(autouse=True)
def _nothing_leaks(llm: LLM) -> Iterator[None]:
    yield
    llm.check_integrity()
    assert llm.num_free_blocks == llm.num_blocks


def run(llm: LLM, *many: dict[str, Any]) -> list[RequestOutput]:
    defaults: dict[str, Any] = {"temperature": 1.0, "max_tokens": 200, "seed": 7}
    defaults["logit_bias"] = dict.fromkeys(_SPACES, -100.0)
    params = [SamplingParams.parse({**defaults, **fields}) for fields in many]
    prompts = [[5 + index, 6, 7] for index in range(len(many))]
    return llm.generate(prompts, params, use_tqdm=False)


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "takes_forced_tokens", False)


CASES: list[dict[str, Any]] = [
    DOCUMENT,
    {**DOCUMENT, "n": 3},
    {**DOCUMENT, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {**DOCUMENT, "max_tokens": 37},
    {**DOCUMENT, "stop": ["lazy", "here again"]},
    {**DOCUMENT, "stop": ["zzz"], "min_tokens": 60},
    {**DOCUMENT, "stop_token_ids": [Tokenizer(byte_level_tokenizer()).encode("z")[0]]},
    {**DOCUMENT, "bad_words": ["lazy"]},
    {**DOCUMENT, "prompt_logprobs": 2},
    {**DOCUMENT, "return_sections": True},
    {"structured_outputs": {"choice": ["a b c d e f", "a b c d e g"]}},
    {"structured_outputs": {"regex": "(x{30}y|z)[ab]{3}w{30}"}},
    {"structured_outputs": {"json": {"type": "integer"}, "begin_after": ","}, "max_tokens": 30},
    {"ignore_eos": True, "max_tokens": 20},
]


def test_tokens_are_those_that_steps_would_sample(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = steps_of(llm, monkeypatch)
    fast, num_fast = run(llm, *CASES), len(seen)
    assert any(schedule.forced is not None for schedule in seen)
    without(monkeypatch)
    slow, num_slow = run(llm, *CASES), len(seen) - num_fast
    for one, other in zip(fast, slow, strict=True):
        assert one.outputs == other.outputs
        assert one.prompt_logprobs == other.prompt_logprobs
        assert one.metrics.num_output_tokens == other.metrics.num_output_tokens
    assert num_fast < num_slow
    assert llm.num_blocks > 120 or llm._core.scheduler.num_preemptions


def test_most_steps_of_a_document_are_saved(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = steps_of(llm, monkeypatch)
    [result] = run(llm, DOCUMENT)
    [output] = result.outputs
    assert set(json.loads(output.text)) == set(SCHEMA["properties"])
    assert output.finish_reason == "stop"
    num_steps = sum(schedule.wants_token.any() for schedule in seen)
    num_tokens = len(output.token_ids)
    num_forced = sum(
        len(schedule.forced.token_ids.values) for schedule in seen if schedule.forced is not None
    )
    assert num_forced > 0.7 * num_tokens
    # A document's last tokens are forced too: no step computes them.
    assert num_steps <= num_tokens - num_forced
    assert llm._core.take_stats().num_generation_tokens >= num_tokens


def test_log_probabilities_are_of_every_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    [with_logprobs] = run(llm, {**DOCUMENT, "logprobs": 1})
    [plain] = run(llm, DOCUMENT)
    [one], [other] = with_logprobs.outputs, plain.outputs
    assert one.token_ids == other.token_ids
    assert one.logprobs is not None
    assert len(one.logprobs) == len(one.token_ids)
    assert all(token in found for token, found in zip(one.token_ids, one.logprobs, strict=True))


def test_a_token_that_the_request_forbids_is_not_forced(llm: LLM) -> None:
    [a] = Tokenizer(byte_level_tokenizer()).encode("a", add_special_tokens=False)
    fields = {"structured_outputs": {"regex": "[ab]xyz"}, "allowed_token_ids": [a]}
    with pytest.raises(RequestError, match="no token is left"):
        run(llm, fields)


def test_too_many_that_the_trial_does_not_reach_end_their_request_alone(llm: LLM) -> None:
    [z] = Tokenizer(byte_level_tokenizer()).encode("z", add_special_tokens=False)
    later = {"structured_outputs": {"regex": "[a-w]|z[0-9](b ){20000}"}, "logit_bias": {z: 100}}
    with pytest.raises(RequestError, match=r"cannot be followed: leaves no choice about \d+"):
        run(llm, later)
    [result] = run(llm, DOCUMENT)
    assert result.outputs[0].finish_reason == "stop"


def test_the_device_is_told_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = steps_of(llm, monkeypatch)
    run(llm, *[DOCUMENT] * 6)
    for schedule in seen:
        if schedule.forced is not None:
            slots = schedule.forced.slots
            assert len(np.unique(slots)) == len(slots)
            assert np.isin(slots, schedule.slots).all()
            assert not np.isin(slots, schedule.new_requests.slots).any()
