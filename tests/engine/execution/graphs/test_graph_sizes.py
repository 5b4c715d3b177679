"""Numbers of rows and tokens for which steps are captured in CUDA graphs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.execution.graphs import graph_sizes
from engine.execution.graphs.graph_sizes import (
    GraphSizes,
    StepTime,
    decode_sizes,
    mixed_sizes,
    next_size,
    time_step,
)

LONG, SHORT = StepTime(0.002, 0.0031), StepTime(0.002, 0.0029)


@given(max_num_seqs=st.integers(1, 1200), data=st.data())
def test_each_number_of_rows_has_a_graph_with_little_padding(
    max_num_seqs: int, data: st.DataObject
) -> None:
    sizes = decode_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    num_rows = data.draw(st.integers(1, max_num_seqs))
    size = next_size(sizes, num_rows)
    assert size is not None
    assert size - num_rows <= max(num_rows / 4, 3) + 7


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (8192, [64, 128, 192, 256, 320, 384, 448, 512]),
        (200, [64, 128, 192, 200]),
        (32, [32]),
    ],
)
def test_models_with_long_steps_are_captured_up_to_512_tokens(
    budget: int, expected: list[int]
) -> None:
    assert mixed_sizes(budget, lambda num_tokens: LONG) == expected


@given(budget=st.integers(1, 10_000), short_up_to=st.integers(0, 10_000), data=st.data())
def test_short_steps_are_captured_up_to_2048_tokens_with_little_padding(
    budget: int, short_up_to: int, data: st.DataObject
) -> None:
    timed: list[int] = []

    def time_step(num_tokens: int) -> StepTime:
        timed.append(num_tokens)
        return SHORT if num_tokens <= short_up_to else LONG

    sizes = mixed_sizes(budget, time_step)
    assert len(timed) <= 5, "start-up is not for measuring"
    assert sizes == sorted(set(sizes))
    assert len(sizes) <= 25
    assert sizes[-1] <= min(budget, 2048)
    assert all(size <= max(512, short_up_to) for size in sizes)
    everything = mixed_sizes(budget, lambda num_tokens: SHORT)
    assert everything[-1] == min(budget, 2048)
    assert sizes == [size for size in everything if size <= max(512, short_up_to)]
    num_tokens = data.draw(st.integers(1, everything[-1]))
    size = next_size(everything, num_tokens)
    assert size is not None
    assert size - num_tokens < max(64, num_tokens / 8)


def test_a_step_is_short_if_the_device_ends_it_soon_after_the_last_launch() -> None:
    assert SHORT.is_short
    assert not LONG.is_short
    assert not StepTime(0.0001, 0.0102).is_short


def test_the_least_disturbed_measurement_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, steps = [0.0], iter([(9.0, 9.0), (0.25, 2.0), (0.5, 1.0), (0.25, 4.0)])
    rest = [0.0]
    monkeypatch.setattr(graph_sizes.time, "perf_counter", lambda: clock[0])

    def run() -> None:
        launch_s, total_s = next(steps)
        clock[0] += launch_s
        rest[0] = total_s - launch_s

    def synchronize() -> None:
        clock[0] += rest[0]
        rest[0] = 0.0

    assert time_step(run, synchronize) == StepTime(0.5, 1.0)


@given(max_num_seqs=st.integers(1, 1200), budget=st.integers(1, 9000))
def test_few_graphs_stand_for_all_when_their_memory_is_measured(
    max_num_seqs: int, budget: int
) -> None:
    sizes = GraphSizes(decode_sizes(max_num_seqs), mixed_sizes(budget, lambda num_tokens: SHORT))
    for few, every in zip(sizes.some(), sizes, strict=True):
        assert (few[0], few[-1]) == (every[0], every[-1])
        assert set(few) <= set(every)
        assert len(few) <= 2 + len(every) // 8
    assert sizes.num_steps >= sizes.some().num_steps
