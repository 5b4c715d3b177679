"""Sampling as CUDA graphs: the head, the draw and the token scatter in one launch.

For steps whose rows want nothing but a draw: greedy, or with temperature, top-k, top-p and min-p.
Such a step is the graph of its forward pass followed by one of these. They are apart so that a step
with masks, penalties, biases or log-probabilities has a captured forward pass too, without a second
graph of it; and so that a mixed step, few of whose rows may want a token, computes the logits of
about these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from engine.execution.downloads import Packed
from engine.execution.graphs.graph_sizes import next_size
from engine.execution.graphs.step_graphs import Capturer, Graph
from engine.nvtx import nvtx_range
from kernels.sampling.draw import sample_tokens
from kernels.step.slot_tables import SlotTables
from kernels.step.token_scatter import scatter_tokens

_ALIGNMENT = 4  # words: kernels take 16 bytes in one load


class SampleGraphs:
    """The graphs of one model, by the number of rows, with filters and without."""

    def __init__(
        self,
        compute_logits: Callable[[Tensor], Tensor],
        tables: SlotTables,
        hidden: Tensor,
        slots: Tensor,
        sizes: list[int],
    ) -> None:
        """Allocate what the graphs for `sizes` read and write.

        Args:
            compute_logits: the head of the model.
            tables: of the sequences.
            hidden, slots: [S, hidden_size] and [S], which the graphs of forward passes write.
            sizes: ascending, S at most.
        """
        self._compute_logits = compute_logits
        self._tables = tables
        self._hidden, self._slots = hidden, slots
        self._sizes = sizes
        self._graphs: dict[tuple[int, bool], Graph] = {}
        most = -(-len(slots) // _ALIGNMENT) * _ALIGNMENT
        words = torch.zeros(3 * most, dtype=torch.int32, device=slots.device)
        self._results = Packed(words, ((torch.int64, (most,)), (torch.int32, (most,))))
        self._token_ids = words[: 2 * most].view(torch.int64)
        self._finish_reasons = words[2 * most :]

    @property
    def num_graphs(self) -> int:
        """How many there are."""
        return 2 * len(self._sizes)

    def capture(self, capturer: Capturer) -> Iterator[None]:
        """Capture the graphs, and yield after each."""
        for size in reversed(self._sizes):  # the smaller ones reuse the memory of the largest
            for has_filters in (True, False):
                work = partial(self._sample, size, has_filters)
                self._graphs[size, has_filters] = capturer.capture(work)
                yield

    def _sample(self, num_rows: int, has_filters: bool) -> None:
        logits = self._compute_logits(self._hidden[:num_rows])
        slots, token_ids = self._slots[:num_rows], self._token_ids[:num_rows]
        sample_tokens(logits, self._tables, slots, has_filters=has_filters, out=token_ids)
        scatter_tokens(self._tables, slots, token_ids, out=self._finish_reasons[:num_rows])

    @nvtx_range("replay sampling")
    def run(self, num_rows: int, *, has_filters: bool) -> Packed:
        """Sample for the first rows of the forward pass before.

        Returns:
            Tokens and finish reasons of as many rows or more, valid until the next step.
        """
        size = next_size(self._sizes, num_rows)
        assert size is not None, "there are at most max_num_seqs rows"
        self._graphs[size, has_filters].replay()
        return self._results
