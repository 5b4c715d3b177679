"""Which steps are captured in graphs, and how they are padded; tests/kernels runs whole engines."""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.errors import InsufficientMemoryError
from engine.execution.step_graphs import CudaCapturer, StepGraphs, decode_sizes, mixed_sizes
from tests.factories.replayed_graphs import ReplayingCapturer

CPU = torch.device("cpu")


@given(max_num_seqs=st.integers(1, 1200), data=st.data())
def test_each_number_of_rows_has_a_graph_with_little_padding(
    max_num_seqs: int, data: st.DataObject
) -> None:
    sizes = decode_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    num_rows = data.draw(st.integers(1, max_num_seqs))
    size = sizes[bisect_left(sizes, num_rows)]
    assert size - num_rows <= max(num_rows / 4, 3) + 7


def test_mixed_steps_are_captured_up_to_a_size() -> None:
    assert mixed_sizes(8192) == [64, 128, 192, 256, 320, 384, 448, 512]
    assert mixed_sizes(200) == [64, 128, 192]
    assert mixed_sizes(63) == []


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


@pytest.fixture
def graphs(forward: Forward) -> StepGraphs:
    graphs = StepGraphs(
        forward, ReplayingCapturer(), max_num_seqs=6, max_num_batched_tokens=100, device=CPU
    )
    forward.calls.clear()
    return graphs


def run(graphs: StepGraphs, counts: list[int]) -> tuple[Tensor, Tensor] | None:
    slots = np.arange(len(counts), dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return graphs.run(slots, starts, counts.count(1))


def test_a_decode_step_takes_the_next_number_of_rows(graphs: StepGraphs, forward: Forward) -> None:
    results = run(graphs, [1, 1, 1])
    assert forward.calls == [([0, 1, 2, -1], [0, 1, 2, 3, 4], 4, 4)]
    assert results is not None
    assert results[1].tolist() == [0, 1, 2, -1]


def test_a_mixed_step_takes_the_next_number_of_tokens(graphs: StepGraphs, forward: Forward) -> None:
    assert run(graphs, [1, 20, 30]) is not None
    assert forward.calls == [([0, 1, 2, -1, -1, -1], [0, 1, 21, 51, 51, 51, 51], 64, None)]


def test_the_inputs_of_one_step_do_not_reach_the_next(graphs: StepGraphs, forward: Forward) -> None:
    run(graphs, [1, 1, 1, 1])
    run(graphs, [1, 1, 1])
    assert forward.calls[-1][0] == [0, 1, 2, -1]


def test_a_larger_step_is_not_captured(graphs: StepGraphs, forward: Forward) -> None:
    assert run(graphs, [1, 64]) is None
    assert forward.calls == []


def test_progress_is_told(forward: Forward) -> None:
    told: list[tuple[int, int]] = []
    StepGraphs(
        forward,
        ReplayingCapturer(),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        device=CPU,
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_where_no_memory_is_left_the_user_is_told_what_to_change() -> None:
    def full(
        slots: Tensor, query_start_loc: Tensor, num_tokens: int, num_decodes: int | None
    ) -> tuple[Tensor, Tensor]:
        if num_decodes == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return slots[:, None].float(), slots.clone()

    with pytest.raises(
        InsufficientMemoryError, match=r"gpu_memory_utilization: .* 4 CUDA graphs .* enforce_eager"
    ):
        StepGraphs(full, ReplayingCapturer(), max_num_seqs=4, max_num_batched_tokens=64, device=CPU)


def test_other_threads_may_use_the_gpu_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/gpu/test_capture.py does so on a GPU."""
    modes: list[str] = []

    @contextmanager
    def graph(graph: object, *, pool: object, capture_error_mode: str = "global") -> Iterator[None]:
        modes.append(capture_error_mode)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    CudaCapturer().capture(lambda: (torch.zeros(1), torch.zeros(1)))
    assert modes == ["thread_local"]
