"""The CUDA graphs of a model: forward passes, and the plain sampling after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from engine.errors import InsufficientMemoryError
from engine.execution.downloads import Packed
from engine.execution.graphs.graph_sizes import (
    GraphSizes,
    StepTime,
    decode_sizes,
    mixed_sizes,
    next_size,
    time_step,
)
from engine.execution.graphs.step_graphs import Capturer, Graph, Rows, StepGraphs
from engine.execution.memory.step_memory import is_out_of_memory
from engine.nvtx import nvtx_range
from kernels.sampling.draw import sample_tokens
from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.token_scatter import scatter_tokens

_ALIGNMENT = 4  # words: kernels take 16 bytes in one load


class SampleGraphs:
    """Sampling as CUDA graphs: the head, the draw and the token scatter in one launch.

    They serve steps whose rows want nothing but a draw: greedy, or with temperature, top-k, top-p
    and min-p, by the number of rows, with filters and without. Such a step is the graph of its
    forward pass followed by one of these. They are apart so that a step with masks, penalties,
    biases or log-probabilities has a captured forward pass too, without a second graph of it; and
    so that a mixed step, few of whose rows may want a token, computes the logits of about these.
    """

    def __init__(
        self,
        compute_logits: Callable[[Tensor], Tensor],
        tables: SeqSlotTables,
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


def run_padding(
    forward: Rows,
    num_rows: int,
    num_tokens: int,
    num_decodes: int | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Launch `forward` for idle rows with equally many tokens each; return what it returns.

    It does all of a step but attention, and changes nothing.
    """
    nobody = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    starts = torch.linspace(0, num_tokens, num_rows + 1).int().to(device)
    return forward(nobody, starts, num_tokens, num_decodes)


def measured_sizes(
    forward: Rows,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    device: torch.device,
    agree: Callable[[int], int],
) -> GraphSizes:
    """Return for which steps a model gets graphs, from their times without attention.

    Args:
        agree: returns the value of rank 0, so that all ranks measure and capture the same steps.
    """
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def time_mixed_step(num_tokens: int) -> StepTime:
        num_rows = min(num_tokens, max_num_seqs)
        run = partial(run_padding, forward, num_rows, num_tokens, None, device)
        found = time_step(run, synchronize)
        return StepTime(*(agree(round(1e9 * seconds)) / 1e9 for seconds in found))

    mixed = mixed_sizes(max_num_batched_tokens, time_mixed_step)
    return GraphSizes(decode_sizes(max_num_seqs), mixed)


class CapturedSteps:
    """All graphs of one model.

    Attributes:
        forward: runs forward passes.
        sampling: samples after one of them; None: each step is sampled by launches.
        num_graphs: how many there are.
    """

    def __init__(
        self,
        forward: Rows,
        compute_logits: Callable[[Tensor], Tensor] | None,
        capturer: Capturer,
        tables: SeqSlotTables,
        *,
        hidden: Tensor,
        sizes: GraphSizes,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Capture them; `on_progress` is called with (captured, total).

        Args:
            forward, compute_logits: are captured; without the second one sampling is not.
            tables: hold the rows of a step.
            hidden: [max_num_seqs, hidden_size], for the last hidden state of each row.
            sizes: of the steps that are captured.

        Raises:
            InsufficientMemoryError: the device has no memory left for them.
        """
        slots = torch.full((len(hidden),), -1, dtype=torch.int32, device=hidden.device)
        self.forward = StepGraphs(forward, tables, (hidden, slots), sizes)
        parts: list[StepGraphs | SampleGraphs] = [self.forward]
        self.sampling: SampleGraphs | None = None
        if compute_logits is not None:
            # The sizes of decode steps: no graph samples for rows that its step does not have.
            self.sampling = SampleGraphs(compute_logits, tables, hidden, slots, sizes.decode)
            parts.append(self.sampling)
        self.num_graphs = total = sum(part.num_graphs for part in parts)
        captures = chain.from_iterable(part.capture(capturer) for part in parts)
        try:
            for done, _ in enumerate(captures, 1):
                on_progress(done, total)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise InsufficientMemoryError(
                f"no memory is left for {total} CUDA graphs beside the KV cache; lower it, or set "
                "enforce_eager to run without CUDA graphs",
                param="gpu_memory_utilization",
            ) from None
