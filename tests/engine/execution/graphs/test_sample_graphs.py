"""Which graph samples for a step, and what it reads; tests/kernels runs whole engines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.execution.downloads import Downloads
from engine.execution.graphs.captured_steps import CapturedSteps, SampleGraphs
from engine.execution.graphs.graph_sizes import (
    GraphSizes,
    StepTime,
    decode_sizes,
    mixed_sizes,
    next_size,
)
from kernels.step.sampling_columns import LENGTH, RUNNING
from tests.factories.errors import refuses
from tests.factories.replayed_graphs import ReplayingCapturer
from tests.factories.sampling import make_tables

NUM_SLOTS, VOCAB = 6, 64


class Head:
    """Gives each row the token `10 * row + 3`."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        self.calls.append(len(hidden))
        return torch.nn.functional.one_hot(10 * hidden[:, 0].long().clamp(0) + 3, VOCAB).float()


@pytest.fixture
def head() -> Head:
    return Head()


@pytest.fixture
def graphs(head: Head) -> SampleGraphs:
    """Of sequences that end with their first token in the slots 1, 3 and 5."""
    slots, tables = torch.arange(NUM_SLOTS, dtype=torch.int32), make_tables(NUM_SLOTS)
    tables.max_tokens.copy_(torch.where(slots % 2 == 0, 99, 1))
    tables.stop_token_ids.fill_(-1)
    hidden = slots[:, None].float()
    graphs = SampleGraphs(head, tables, hidden, slots, [1, 2, 4, 6])
    capturer = ReplayingCapturer()
    assert len(list(graphs.capture(capturer))) == len(capturer.graphs) == graphs.num_graphs == 8
    tables.finish_reasons.zero_()
    tables.num_tokens.zero_()
    head.calls.clear()
    return graphs


@pytest.mark.parametrize("has_filters", [False, True])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_a_step_takes_the_next_number_of_rows(
    num_rows: int, size: int, has_filters: bool, head: Head, graphs: SampleGraphs
) -> None:
    packed = graphs.run(num_rows, has_filters=has_filters)
    token_ids, finish_reasons = Downloads(torch.device("cpu")).copy(packed).wait()
    assert head.calls == [size]
    assert graphs._graphs[size, has_filters].num_replays == 1
    assert token_ids[:num_rows].tolist() == [10 * row + 3 for row in range(num_rows)]
    assert finish_reasons[:num_rows].tolist() == [
        LENGTH if row % 2 else RUNNING for row in range(num_rows)
    ]


@given(max_num_seqs=st.integers(1, 1200), budget=st.integers(1, 3000), data=st.data())
def test_no_graph_samples_for_rows_that_its_step_does_not_have(
    max_num_seqs: int, budget: int, data: st.DataObject
) -> None:
    """Slots after the last row of a step are those of an earlier one."""
    sizes = mixed_sizes(max(budget, max_num_seqs), lambda num_tokens: StepTime(0.0, 0.0))
    num_rows = data.draw(st.sampled_from([min(size, max_num_seqs) for size in sizes]))
    size = next_size(decode_sizes(max_num_seqs), data.draw(st.integers(1, num_rows)))
    assert size is not None
    assert size <= num_rows


class Forward:
    """The forward pass of a step, for one row of which there may be no memory."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def __call__(
        self, slots: Tensor, query_start_loc: Tensor, num_tokens: int, num_decodes: int | None
    ) -> tuple[Tensor, Tensor]:
        if self.fails and num_decodes == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return slots[:, None].float(), slots.clone()


def test_progress_and_what_is_captured_are_told(head: Head) -> None:
    told: list[tuple[int, int]] = []
    captured = CapturedSteps(
        Forward(fails=False),
        head,
        ReplayingCapturer(),
        make_tables(4),
        hidden=torch.zeros(4, 1),
        sizes=GraphSizes([1, 2, 4], [64]),
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(done, 10) for done in range(1, 11)]
    assert captured.num_graphs == 10


def test_where_no_memory_is_left_the_user_is_told_what_to_change(head: Head) -> None:
    with refuses(
        "insufficient_memory", "gpu_memory_utilization", match="10 CUDA graphs .* enforce_eager"
    ):
        CapturedSteps(
            Forward(fails=True),
            head,
            ReplayingCapturer(),
            make_tables(4),
            hidden=torch.zeros(4, 1),
            sizes=GraphSizes([1, 2, 4], [64]),
        )
