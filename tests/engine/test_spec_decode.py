"""Guesses of next tokens save steps, and change nothing that a request gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.offline.outputs import RequestOutput
from engine.protocol.messages import AddRequest
from engine.protocol.token_ids import pack_token_ids
from tests.factories.steps import steps_of

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}
NGRAM["prompt_lookup_min"] = 1  # so that even a model that knows nothing repeats itself
SETTINGS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_num_seqs": 8}
REPEATED = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), **SETTINGS)


@pytest.fixture(scope="module", params=["roomy", "tight", "host"])
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> LLM:
    more: dict[str, Any] = {}
    if request.param != "roomy":  # chunks are cut, and sequences preempted
        more = {"num_gpu_blocks_override": 90, "max_num_batched_tokens": 16, "max_num_seqs": 5}
    if request.param == "host":
        more |= {"swap_space": 2**-6, "enable_prefix_caching": False}
    return LLM(str(checkpoint), speculative_config=NGRAM, **{**SETTINGS, **more})


@pytest.fixture(autouse=True)
def _nothing_leaks(llm: LLM) -> Iterator[None]:
    yield
    llm.check_integrity()
    assert llm.num_free_blocks == llm.num_blocks


def run(llm: LLM, *many: dict[str, Any], at_once: bool = False) -> list[RequestOutput]:
    defaults = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, "seed": 3}
    params = [SamplingParams.parse({**defaults, **fields}) for fields in many]
    prompts = [[20 + index, *REPEATED] for index in range(len(many))]
    if at_once:
        return llm.generate(prompts, params, use_tqdm=False)
    pairs = zip(prompts, params, strict=True)
    return [llm.generate(prompt, each, use_tqdm=False)[0] for prompt, each in pairs]


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3, "top_k": 5},
    {"temperature": 0.2, "top_p": 0.8, "min_p": 0.01, "n": 3},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": -0.4},
    {"logprobs": 3},
    {"temperature": 0.3, "logprobs": 0, "n": 2},
    {"prompt_logprobs": 2},
    {"logit_bias": {7: 3.0, 30: -2.0}},
    {"allowed_token_ids": [5, 6, 7, 8, 9, 40, 41]},
    {"stop": ["a", "e "]},
    {"stop_token_ids": list(range(100, 130)), "temperature": 1.0},
    {"ignore_eos": False, "min_tokens": 20, "temperature": 1.0, "stop_token_ids": [5, 6, 7]},
    {"min_tokens": 20, "stop_token_ids": list(range(40, 80)), "temperature": 1.0},
    {"max_tokens": 7},
    {"max_tokens": 1},
    {"bad_words": ["a", "b"], "temperature": 0.5},
    {"structured_outputs": {"regex": "(ab|ba){4,30}c"}},
    {"dry_multiplier": 2.0, "dry_allowed_length": 2},
    {"typical_p": 0.9, "top_n_sigma": 2.0, "temperature": 0.4},
    {"beam_width": 2, "max_tokens": 9},
    {"return_sections": True},
    {"temperature": 0.3, "best_of": 2},
]


@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "at-once"])
def test_the_tokens_are_the_same(llm: LLM, plain: LLM, *, at_once: bool) -> None:
    for mine, theirs in zip(run(llm, *CASES, at_once=at_once), run(plain, *CASES), strict=True):
        assert [each.token_ids for each in mine.outputs] == [e.token_ids for e in theirs.outputs]
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
            assert one.stop_reason == other.stop_reason
            assert (one.logprobs is None) == (other.logprobs is None)
            for here, there in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert list(here) == list(there)
                found = [entry.logprob for entry in here.values()]
                expected = [entry.logprob for entry in there.values()]
                assert found == pytest.approx(expected, abs=1e-4)
    stats = llm._core.take_stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_drafts <= stats.num_draft_tokens


def test_repeated_text_takes_a_fraction_of_the_steps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = steps_of(llm, monkeypatch)
    llm._core.take_stats()
    [result] = run(llm, {"allowed_token_ids": [5]})
    assert result.outputs[0].token_ids == [5] * 60
    assert len(seen) < 60 / 4
    stats = llm._core.take_stats()
    assert stats.num_generation_tokens == 60
    drafts = [schedule.drafts for schedule in seen if schedule.drafts is not None]
    assert stats.num_drafts == len(drafts)
    assert stats.num_draft_tokens == sum(len(each.token_ids.values) for each in drafts)
    # All are right but those before the first token is repeated, and none is left over at the end.
    assert stats.num_draft_tokens - stats.num_accepted_tokens <= 5
    assert len(seen) + stats.num_accepted_tokens == 60


def test_steps_with_more_to_do_have_no_drafts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = steps_of(llm, monkeypatch)
    run(llm, *[{"allowed_token_ids": [5]}] * 8, at_once=True)
    with_drafts = [each for each in seen if each.drafts is not None]
    assert with_drafts
    for schedule in with_drafts:
        assert schedule.total_num_tokens <= 12 + len(schedule.new_requests.slots) * 16
        rows = schedule.drafts.rows if schedule.drafts is not None else np.zeros(0)
        assert (schedule.num_tokens[rows] > 1).all()
        assert schedule.wants_token[rows].all()


def test_a_request_that_is_aborted_takes_its_drafts_along(llm: LLM) -> None:
    core = llm._core
    params = {"temperature": 0.0, "max_tokens": 500, "ignore_eos": True}
    uid = llm._next_uid = llm._next_uid + 1
    core.add_request(AddRequest(uid, pack_token_ids([5] * 40), params))
    for _ in range(9):
        core.step()
        core.check_integrity()
    core.abort(uid)
    assert not core.has_unfinished_requests()
    llm._next_uid += 1
