"""The steps of the warm-up and what they leave behind; tests/kernels checks their kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.config.engine_config import EngineConfig
from engine.execution.devices import ResolvedConfig, choose_device, resolve
from engine.execution.warm_up import largest_step, warm_up_steps
from kernels.step.sampling_columns import ALLOWED, BIAS, LOGPROBS, SAMPLING_COLUMNS

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 100,
}


def config(**settings: object) -> ResolvedConfig:
    given = EngineConfig.parse({"device": "cpu", **settings})
    return resolve(given, choose_device(given))


@given(
    max_num_seqs=st.integers(1, 40),
    more_tokens=st.integers(0, 300),
    max_model_len=st.integers(1, 200),
)
@example(max_num_seqs=1, more_tokens=0, max_model_len=2)
def test_steps_keep_to_the_limits_and_the_first_is_the_largest(
    max_num_seqs: int, more_tokens: int, max_model_len: int
) -> None:
    limits = config(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + more_tokens)
    most = min(limits.max_num_batched_tokens, max_num_seqs * max_model_len)
    steps = list(warm_up_steps(limits, max_model_len))
    assert steps[0].total_num_tokens == most
    assert steps[0].num_rows == max_num_seqs
    for step in steps:
        assert step.total_num_tokens <= most
        assert 1 <= step.num_rows <= max_num_seqs
        assert step.num_tokens.min() >= 1
        assert step.num_tokens.max() <= max_model_len
        assert step.num_decodes == np.searchsorted(step.num_tokens, 2)
        assert not step.block_writes.block_ids.values.any(), "only the null block is allocated"
    decodes = {step.num_rows for step in steps if step.num_decodes == step.num_rows}
    assert decodes >= {2**i for i in range(1, 10) if 2**i <= max_num_seqs}


def test_the_largest_step_takes_the_memory_of_every_feature() -> None:
    new_requests = largest_step(config(max_logprobs=50), 64).new_requests
    assert (new_requests.num_top_logprobs == 50).all()
    every = ALLOWED | BIAS | LOGPROBS
    for name, column in SAMPLING_COLUMNS.items():
        assert (getattr(new_requests, name) != np.array(column.off, column.dtype)).all(), name
        every |= column.feature
    assert (new_requests.features == every).all()


@pytest.mark.parametrize("most", [0, 1, 20, 50])
def test_each_way_to_find_log_probabilities_is_taken(most: int) -> None:
    steps = warm_up_steps(config(max_logprobs=most), 64)
    asked = {
        int(number)
        for step in steps
        for number in step.new_requests.num_top_logprobs[step.new_requests.features & LOGPROBS > 0]
    }
    assert asked == {0, min(1, most), most}


def test_counts_for_penalties_are_allocated_by_the_first_request_that_needs_them(
    checkpoint: Path,
) -> None:
    llm = LLM(str(checkpoint), **SETTINGS)
    runner: Any = llm._core._runner
    runner.warm_up()

    def num_counted() -> int:
        return len(runner.state["output_counts"])

    assert num_counted() == 1, "they take 4 bytes per slot and token of the vocabulary"
    llm.generate("a", SamplingParams(max_tokens=3), use_tqdm=False)
    assert num_counted() == 1
    llm.generate("a", SamplingParams(max_tokens=3, presence_penalty=0.5), use_tqdm=False)
    assert num_counted() == SETTINGS["max_num_seqs"]


@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.3, "logprobs": 2}])
def test_answers_are_those_of_an_engine_without_warm_up(
    checkpoint: Path, sampling: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, **sampling)
    cold, warm = (LLM(str(checkpoint), **SETTINGS) for _ in range(2))
    warm._core._runner.warm_up()  # type: ignore[attr-defined]
    prompts = ["abc", "a longer prompt of several words", "x"]
    expected = cold.generate(prompts, params, use_tqdm=False)
    found = warm.generate(prompts, params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in found] == [
        each.outputs[0].token_ids for each in expected
    ]


def test_each_way_to_score_prompts_is_taken_and_the_most_in_the_largest_step() -> None:
    largest, *others = warm_up_steps(config(max_logprobs=20), 64)
    assert largest.scored is not None
    assert (len(largest.scored.logits_indices), largest.scored.num_top) == (
        largest.total_num_tokens,
        20,
    )
    assert {step.scored.num_top for step in others if step.scored is not None} == {0, 1}
