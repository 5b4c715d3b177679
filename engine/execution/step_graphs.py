"""Forward passes as CUDA graphs: one launch in place of hundreds, for steps of a few shapes.

A graph repeats the kernels of one forward pass with the same shapes and addresses. Graphs are
captured for several sizes, and a step is padded to the next larger one, which costs little. A
decode step has one token in each row. A mixed step, of decode rows and prompt chunks, is captured
by its number of tokens; the device finds out which rows decode. Larger steps are launched kernel by
kernel: they keep the device busy for longer than the launches take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.graph_sizes import decode_sizes, next_size
from engine.nvtx import nvtx_range
from kernels.upload import upload_into


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
        return graph


class StepGraphs:
    """The graphs of one model, by the size of the step.

    They all read the same inputs and write the same results, so that none keeps tensors of its own.
    """

    def __init__(
        self, forward: Rows, results: tuple[Tensor, Tensor], mixed_sizes: list[int]
    ) -> None:
        """Allocate what the graphs read.

        Args:
            forward: is captured.
            results: what it returns, for `max_num_seqs` rows: the graphs write it there.
            mixed_sizes: numbers of tokens of mixed steps, ascending.
        """
        self._forward = forward
        self._results = results
        self._max_num_seqs, device = len(results[1]), results[1].device
        # Slots [S], then query_start_loc [S + 1] of mixed steps.
        self._inputs = torch.zeros(2 * self._max_num_seqs + 1, dtype=torch.int32, device=device)
        self._inputs[: self._max_num_seqs] = -1
        self._decode_starts = torch.arange(self._max_num_seqs + 1, dtype=torch.int32, device=device)
        self._decode_sizes = decode_sizes(self._max_num_seqs)
        self._mixed_sizes = mixed_sizes
        self._mixed: dict[int, Graph] = {}
        self._decode: dict[int, Graph] = {}

    @property
    def num_graphs(self) -> int:
        """How many there are."""
        return len(self._decode_sizes) + len(self._mixed_sizes)

    def capture(self, capturer: Capturer) -> Iterator[None]:
        """Capture the graphs, and yield after each."""
        # The largest first: the smaller ones reuse its memory in the pool.
        for size in reversed(self._mixed_sizes):
            num_rows = min(size, self._max_num_seqs)
            starts = self._inputs[self._max_num_seqs :][: num_rows + 1]
            self._mixed[size] = capturer.capture(self._work(num_rows, starts, size, None))
            yield
        for size in reversed(self._decode_sizes):
            starts = self._decode_starts[: size + 1]
            self._decode[size] = capturer.capture(self._work(size, starts, size, size))
            yield

    @nvtx_range("replay forward")
    def run(
        self, slots: NDArray[np.int32], query_start_loc: NDArray[np.int32], num_decodes: int
    ) -> tuple[Tensor, Tensor] | None:
        """Run a step; return the results of `forward`, valid until the next step.

        Rows after those of the step are padding. None if the step is too large for any graph.
        """
        num_rows, num_tokens = len(slots), int(query_start_loc[-1])
        if num_rows == num_decodes:
            size = next_size(self._decode_sizes, num_rows)
            assert size is not None
            upload_into(_padded(slots, size, -1), self._inputs[:size])
            return self._replay(self._decode[size], size)
        size = next_size(self._mixed_sizes, num_tokens)
        if size is None:
            return None
        most = self._max_num_seqs
        starts = _padded(query_start_loc, most + 1, num_tokens)
        upload_into(np.concatenate([_padded(slots, most, -1), starts]), self._inputs)
        return self._replay(self._mixed[size], min(size, most))

    def _replay(self, graph: Graph, num_rows: int) -> tuple[Tensor, Tensor]:
        graph.replay()
        hidden, slots = self._results
        return hidden[:num_rows], slots[:num_rows]

    def _work(
        self, num_rows: int, starts: Tensor, num_tokens: int, num_decodes: int | None
    ) -> Callable[[], None]:
        slots = self._inputs[:num_rows]

        def work() -> None:
            found = self._forward(slots, starts, num_tokens, num_decodes)
            for result, values in zip(self._results, found, strict=True):
                result[:num_rows].copy_(values)

        return work


def _padded(values: NDArray[np.int32], size: int, padding: int) -> NDArray[np.int32]:
    out = np.full(size, padding, dtype=np.int32)
    out[: len(values)] = values
    return out
