"""Forward passes as CUDA graphs: one launch in place of hundreds, for steps of a few shapes.

A graph repeats the kernels of one forward pass with the same shapes and addresses. Graphs are
captured for several sizes, and a step is padded to the next larger one, which costs little. A
decode step has one token in each row. A mixed step, of decode rows and prompt chunks, is captured
by its number of tokens; the device finds out which rows decode. Larger steps are launched kernel by
kernel: they keep the device busy for longer than the launches take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.execution.graphs.graph_sizes import GraphSizes, next_size
from engine.nvtx import nvtx_range
from kernels.step.seq_slot_tables import SeqSlotTables


class Rows(Protocol):
    """The forward pass of a step, as `ModelRunner` computes it."""

    def __call__(
        self, slots: Tensor, query_start_loc: Tensor, num_tokens: int, num_decodes: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return the last hidden state of each row, and the slot to sample for or -1."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Run it again on the current values of its inputs."""


class Capturer(Protocol):
    """Captures work to replay it."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Return the graph of `work`, which reads and writes tensors that outlive it."""


class CudaCapturer:
    """Captures CUDA graphs that share a memory pool: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Graph:
        # Run once before: compilation and one-time allocations must not be captured.
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads, such as freeing memory, must not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        # The first launch uploads the graph: no request waits for that, and its memory is measured.
        graph.replay()
        return graph


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A forward pass of a certain size.

    Attributes:
        num_rows: how many rows it has, padding included.
        results: what the forward pass returns, for these rows.
    """

    num_rows: int
    graph: Graph
    results: tuple[Tensor, Tensor]

    @nvtx_range("replay forward")
    def run(self) -> tuple[Tensor, Tensor]:
        """Run the rows that the slot tables hold; the results are valid until the next step."""
        self.graph.replay()
        return self.results


class StepGraphs:
    """The graphs of one model, by the size of the step.

    They all read their rows from the slot tables and write the same results, so that none keeps
    tensors of its own.
    """

    def __init__(
        self,
        forward: Rows,
        tables: SeqSlotTables,
        results: tuple[Tensor, Tensor],
        sizes: GraphSizes,
    ) -> None:
        """Prepare the capture.

        Args:
            forward: is captured.
            tables: hold the rows of a step, as `step_slots` and `query_start_loc`.
            results: what it returns, for `max_num_seqs` rows: the graphs write it there.
            sizes: of the steps that are captured.
        """
        self._forward = forward
        self._results = results
        self._max_num_seqs, device = len(results[1]), results[1].device
        tables.step_slots.fill_(-1)
        tables.query_start_loc.zero_()
        self._tables = tables
        self._decode_starts = torch.arange(self._max_num_seqs + 1, dtype=torch.int32, device=device)
        self._decode_sizes = sizes.decode
        self._mixed_sizes = sizes.mixed
        self._mixed: dict[int, CapturedStep] = {}
        self._decode: dict[int, CapturedStep] = {}

    @property
    def num_graphs(self) -> int:
        """How many there are."""
        return len(self._decode_sizes) + len(self._mixed_sizes)

    def capture(self, capturer: Capturer) -> Iterator[None]:
        """Capture the graphs, and yield after each."""
        # The largest first: the smaller ones reuse its memory in the pool.
        for size in reversed(self._mixed_sizes):
            num_rows = min(size, self._max_num_seqs)
            starts = self._tables.query_start_loc[: num_rows + 1]
            self._mixed[size] = self._capture(capturer, num_rows, starts, size, None)
            yield
        for size in reversed(self._decode_sizes):
            starts = self._decode_starts[: size + 1]
            self._decode[size] = self._capture(capturer, size, starts, size, size)
            yield

    def find(self, num_rows: int, num_tokens: int, num_decodes: int) -> CapturedStep | None:
        """Return the graph for a step of this size; None if it is too large for any."""
        if num_rows == num_decodes:
            size = next_size(self._decode_sizes, num_rows)
            assert size is not None
            return self._decode[size]
        size = next_size(self._mixed_sizes, num_tokens)
        return None if size is None else self._mixed[size]

    def _capture(
        self,
        capturer: Capturer,
        num_rows: int,
        starts: Tensor,
        num_tokens: int,
        num_decodes: int | None,
    ) -> CapturedStep:
        slots = self._tables.step_slots[:num_rows]
        results = self._results[0][:num_rows], self._results[1][:num_rows]

        def work() -> None:
            found = self._forward(slots, starts, num_tokens, num_decodes)
            for result, values in zip(results, found, strict=True):
                result.copy_(values)

        return CapturedStep(num_rows, capturer.capture(work), results)
