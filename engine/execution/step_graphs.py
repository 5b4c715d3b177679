"""Forward passes as CUDA graphs: one launch in place of hundreds, for steps of a few shapes.

A graph repeats the kernels of one forward pass with the same shapes and addresses. Graphs are
captured for several sizes, and a step is padded to the next larger one, which costs little. A
decode step has one token in each row. A mixed step, of decode rows and prompt chunks, is captured
by its number of tokens; the device finds out which rows decode. Larger steps are launched kernel by
kernel: they keep the device busy for longer than the launches take.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import InsufficientMemoryError
from kernels.upload import upload_into

_MAX_MIXED_TOKENS = 512
_MIXED_STEP = 64


class Rows(Protocol):
    """The forward pass of a step, as `ModelRunner` computes it."""

    def __call__(
        self, slots: Tensor, query_start_loc: Tensor, num_tokens: int, num_decodes: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return the last hidden state of each row, and the slot to sample for or -1."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Run it again on the current values of its inputs; overwrites its results."""


class Capturer(Protocol):
    """Captures work to replay it."""

    def capture(
        self, work: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Graph, tuple[Tensor, Tensor]]:
        """Return the graph of `work`, and the tensors of its results."""


class CudaCapturer:
    """Captures CUDA graphs that share a memory pool: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(
        self, work: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Graph, tuple[Tensor, Tensor]]:
        # Run once before: compilation and one-time allocations must not be captured.
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads, such as freeing memory, must not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = work()
        return graph, results


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph with the tensors that it reads and writes.

    Attributes:
        inputs: int32; slots [R], then query_start_loc [R + 1] for a mixed step.
    """

    graph: Graph
    inputs: Tensor
    results: tuple[Tensor, Tensor]


class StepGraphs:
    """The graphs of one model, by the size of the step."""

    def __init__(
        self,
        forward: Rows,
        capturer: Capturer,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        device: torch.device,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Capture the graphs of `forward`; `on_progress` is called with (captured, total).

        Raises:
            InsufficientMemoryError: the device has no memory left for them.
        """
        self._capturer = capturer
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._decode_sizes = decode_sizes(max_num_seqs)
        self._mixed_sizes = mixed_sizes(max_num_batched_tokens)
        total = len(self._decode_sizes) + len(self._mixed_sizes)
        self._mixed: dict[int, _Captured] = {}
        self._decode: dict[int, _Captured] = {}
        try:
            # The largest first: the smaller ones reuse its memory in the pool.
            for done, size in enumerate(reversed(self._mixed_sizes), 1):
                self._mixed[size] = self._capture_mixed(forward, size)
                on_progress(done, total)
            for done, size in enumerate(reversed(self._decode_sizes), len(self._mixed) + 1):
                self._decode[size] = self._capture_decode(forward, size)
                on_progress(done, total)
        except torch.OutOfMemoryError:
            raise InsufficientMemoryError(
                f"gpu_memory_utilization: no memory is left for {total} CUDA graphs beside the KV "
                "cache; lower it, or set enforce_eager to do without them"
            ) from None

    def run(
        self, slots: NDArray[np.int32], query_start_loc: NDArray[np.int32], num_decodes: int
    ) -> tuple[Tensor, Tensor] | None:
        """Run a step; return the results of `forward`, valid until the next step.

        Rows after those of the step are padding. None if the step is too large for any graph.
        """
        num_rows, num_tokens = len(slots), int(query_start_loc[-1])
        if num_rows == num_decodes:
            captured = self._decode[_next(self._decode_sizes, num_rows)]
            upload_into(_padded(slots, len(captured.inputs), -1), captured.inputs)
        elif self._mixed_sizes and num_tokens <= self._mixed_sizes[-1]:
            captured = self._mixed[_next(self._mixed_sizes, num_tokens)]
            room = len(captured.inputs) // 2
            starts = _padded(query_start_loc, room + 1, num_tokens)
            upload_into(np.concatenate([_padded(slots, room, -1), starts]), captured.inputs)
        else:
            return None
        captured.graph.replay()
        return captured.results

    def _capture_decode(self, forward: Rows, size: int) -> _Captured:
        slots = torch.full((size,), -1, dtype=torch.int32, device=self._device)
        starts = torch.arange(size + 1, dtype=torch.int32, device=self._device)
        graph, results = self._capturer.capture(lambda: forward(slots, starts, size, size))
        return _Captured(graph, slots, results)

    def _capture_mixed(self, forward: Rows, size: int) -> _Captured:
        num_rows = min(size, self._max_num_seqs)
        inputs = torch.zeros(2 * num_rows + 1, dtype=torch.int32, device=self._device)
        slots, starts = inputs[:num_rows], inputs[num_rows:]
        slots.fill_(-1)
        graph, results = self._capturer.capture(lambda: forward(slots, starts, size, None))
        return _Captured(graph, inputs, results)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows captured for decode steps: about an eighth is padding at most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return the numbers of tokens captured for mixed steps."""
    largest = min(max_num_batched_tokens, _MAX_MIXED_TOKENS)
    return list(range(_MIXED_STEP, largest + 1, _MIXED_STEP))


def _next(sizes: list[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]


def _padded(values: NDArray[np.int32], size: int, padding: int) -> NDArray[np.int32]:
    out = np.full(size, padding, dtype=np.int32)
    out[: len(values)] = values
    return out
