"""Which graph a step takes, and how it is padded; tests/kernels runs whole engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.execution.graphs.graph_sizes import GraphSizes
from engine.execution.graphs.step_graphs import CudaCapturer, StepGraphs
from engine.execution.slot_writes import slot_writes
from tests.factories.replayed_graphs import ReplayedGraph, ReplayingCapturer
from tests.factories.sampling import EMPTY, make_tables

SIZES = GraphSizes([1, 2, 4, 6], [64])


class Forward:
    """Says what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int], int, int | None]] = []

    def __call__(
        self, slots: Tensor, query_start_loc: Tensor, num_tokens: int, num_decodes: int | None
    ) -> tuple[Tensor, Tensor]:
        self.calls.append((slots.tolist(), query_start_loc.tolist(), num_tokens, num_decodes))
        return slots[:, None].float(), slots.clone()


@pytest.fixture
def forward() -> Forward:
    return Forward()


def results(max_num_seqs: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(max_num_seqs, 1), torch.full((max_num_seqs,), -1, dtype=torch.int32)


@pytest.fixture
def graphs(forward: Forward) -> StepGraphs:
    graphs = StepGraphs(forward, make_tables(6), results(6), SIZES)
    assert len(list(graphs.capture(ReplayingCapturer()))) == graphs.num_graphs
    forward.calls.clear()
    return graphs


def run(graphs: StepGraphs, counts: list[int]) -> tuple[Tensor, Tensor] | None:
    captured = graphs.find(len(counts), sum(counts), counts.count(1))
    if captured is None:
        return None
    slots = np.arange(len(counts), dtype=np.int32)
    schedule = replace(EMPTY, slots=slots, num_tokens=np.array(counts, dtype=np.int32))
    slot_writes(schedule, graphs._tables, captured.num_rows).apply()
    return captured.run()


def test_a_decode_step_takes_the_next_number_of_rows(graphs: StepGraphs, forward: Forward) -> None:
    found = run(graphs, [1, 1, 1])
    assert forward.calls == [([0, 1, 2, -1], [0, 1, 2, 3, 4], 4, 4)]
    assert found is not None
    assert found[1].tolist() == [0, 1, 2, -1]


def test_a_mixed_step_takes_the_next_number_of_tokens(graphs: StepGraphs, forward: Forward) -> None:
    assert run(graphs, [1, 20, 30]) is not None
    assert forward.calls == [([0, 1, 2, -1, -1, -1], [0, 1, 21, 51, 51, 51, 51], 64, None)]


def test_the_inputs_of_one_step_do_not_reach_the_next(graphs: StepGraphs, forward: Forward) -> None:
    run(graphs, [1, 1, 1, 1])
    run(graphs, [1, 1, 1])
    assert forward.calls[-1][0] == [0, 1, 2, -1]


def test_all_graphs_write_the_same_results(forward: Forward) -> None:
    hidden, slots = results(6)
    graphs = StepGraphs(forward, make_tables(6), (hidden, slots), SIZES)
    list(graphs.capture(ReplayingCapturer()))
    for counts in ([1, 1, 1], [1, 5], [1, 1, 1, 1, 1]):
        found = run(graphs, counts)
        assert found is not None
        assert [result.data_ptr() for result in found] == [hidden.data_ptr(), slots.data_ptr()]
        num_rows = len(counts)
        assert found[1].tolist() == [*range(num_rows), *[-1] * (len(found[1]) - num_rows)]
        assert found[0][:, 0].tolist() == found[1].tolist()


def test_a_larger_step_is_not_captured(graphs: StepGraphs, forward: Forward) -> None:
    assert run(graphs, [1, 64]) is None
    assert forward.calls == []


def test_a_capture_bears_other_threads_and_is_launched_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/gpu/test_capture.py does so on a GPU."""
    happened: list[str] = []

    @contextmanager
    def graph(graph: object, *, pool: object, capture_error_mode: str = "global") -> Iterator[None]:
        happened.append(capture_error_mode)
        yield
        happened.append("captured")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: ReplayedGraph(lambda: None))
    monkeypatch.setattr(ReplayedGraph, "replay", lambda graph: happened.append("launched"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    CudaCapturer().capture(lambda: happened.append("work"))
    assert happened == ["work", "thread_local", "work", "captured", "launched"]
