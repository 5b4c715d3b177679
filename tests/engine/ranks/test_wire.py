"""A step that has travelled is the step that was sent."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.logprobs.scored_tokens import ScoredTokens
from engine.core.ragged import Int32s, Ragged, ragged
from engine.core.schedule import (
    MAX_STOP_TOKEN_IDS,
    BlockWrites,
    ForcedTokens,
    NewRequestData,
    SchedulerOutput,
)
from engine.core.spec_decode.draft_tokens import DraftTokens
from engine.ranks.wire import Step, ToRank, decode_step, encode_step
from kernels.step.sampling_columns import SAMPLING_COLUMNS


def numbers(count: int, draw: np.random.Generator) -> Int32s:
    return draw.integers(-5, 2**31 - 1, count, dtype=np.int32)


def some_step(rows: int, new: int, has_others: bool, seed: int) -> SchedulerOutput:
    draw = np.random.default_rng(seed)

    def lists(count: int) -> Ragged:
        return ragged([numbers(draw.integers(0, 5), draw) for _ in range(count)])

    new_requests = NewRequestData(
        slots=numbers(new, draw),
        token_ids=lists(new),
        num_prompt_tokens=numbers(new, draw),
        num_computed_tokens=numbers(new, draw),
        min_tokens=numbers(new, draw),
        max_tokens=numbers(new, draw),
        stop_token_ids=numbers(new * MAX_STOP_TOKEN_IDS, draw).reshape(new, MAX_STOP_TOKEN_IDS),
        features=numbers(new, draw),
        seeds=draw.integers(0, 2**64, new, dtype=np.uint64),
        num_top_logprobs=numbers(new, draw),
        bias_token_ids=(biases := lists(new)),
        bias_values=draw.random(len(biases.values), dtype=np.float32),
        allowed_token_ids=lists(new),
        **{
            name: draw.random(new).astype(column.dtype) for name, column in SAMPLING_COLUMNS.items()
        },
    )
    writes = BlockWrites(*(numbers(new, draw) for _ in range(3)), lists(new))
    return SchedulerOutput(
        slots=numbers(rows, draw),
        num_tokens=numbers(rows, draw),
        wants_token=draw.random(rows) < 0.5,
        num_output_tokens=numbers(rows, draw),
        num_decodes=rows // 2,
        new_requests=new_requests,
        block_writes=writes,
        swap_out=numbers(2 * new, draw).reshape(-1, 2),
        copies=numbers(2 * rows, draw).reshape(-1, 2),
        swap_in=numbers(0, draw).reshape(-1, 2),
        scored=ScoredTokens(numbers(3, draw), numbers(3, draw), 5) if has_others else None,
        forced=ForcedTokens(numbers(2, draw), numbers(2, draw), lists(2)) if has_others else None,
        embedded=numbers(2, draw) if has_others else None,
        drafts=DraftTokens(numbers(2, draw), numbers(2, draw), lists(2)) if has_others else None,
    )


def assert_equal(found: object, expected: object) -> None:
    if is_dataclass(expected):
        assert type(found) is type(expected)
        for field in fields(expected):
            assert_equal(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert (found == expected).all()
    else:
        assert found == expected


@given(st.integers(0, 20), st.integers(0, 5), st.booleans(), st.integers(0, 2**32))
def test_step_any_arrays_arrive_as_they_were(
    rows: int, new: int, has_others: bool, seed: int
) -> None:
    step = some_step(rows, new, has_others, seed)
    content = msgspec.msgpack.encode(encode_step(step))
    found = msgspec.msgpack.decode(content, type=ToRank)
    assert isinstance(found, Step)
    assert_equal(decode_step(found), step)


def test_step_rows_of_different_lengths_are_refused() -> None:
    step = some_step(4, 0, False, 0)
    with pytest.raises(ValueError, match="a step of 4 rows"):
        decode_step(encode_step(replace(step, num_tokens=step.num_tokens[:3])))
