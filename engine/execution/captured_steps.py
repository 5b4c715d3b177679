"""The CUDA graphs of a model: forward passes, and the plain sampling after them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from engine.errors import InsufficientMemoryError
from engine.execution.graph_sizes import decode_sizes
from engine.execution.sample_graphs import SampleGraphs, SampleRows
from engine.execution.step_graphs import Capturer, Rows, StepGraphs
from kernels.slot_tables import SlotTables


class CapturedSteps:
    """All graphs of one model.

    Attributes:
        forward: runs forward passes.
        sampling: samples after one of them.
    """

    def __init__(
        self,
        forward: Rows,
        sample: SampleRows,
        capturer: Capturer,
        tables: SlotTables,
        *,
        hidden: Tensor,
        mixed_sizes: list[int],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Capture them; `on_progress` is called with (captured, total).

        Args:
            forward, sample: are captured.
            tables: hold the rows of a step.
            hidden: [max_num_seqs, hidden_size], for the last hidden state of each row.
            mixed_sizes: numbers of tokens of mixed steps, ascending.

        Raises:
            InsufficientMemoryError: the device has no memory left for them.
        """
        slots = torch.full((len(hidden),), -1, dtype=torch.int32, device=hidden.device)
        self.forward = StepGraphs(forward, tables, (hidden, slots), mixed_sizes)
        # The same sizes as of decode steps: no graph samples for rows that its step does not have.
        self.sampling = SampleGraphs(sample, hidden, slots, decode_sizes(len(hidden)))
        total = self.forward.num_graphs + self.sampling.num_graphs
        captures = chain(self.forward.capture(capturer), self.sampling.capture(capturer))
        try:
            for done, _ in enumerate(captures, 1):
                on_progress(done, total)
        except torch.OutOfMemoryError:
            raise InsufficientMemoryError(
                f"gpu_memory_utilization: no memory is left for {total} CUDA graphs beside the KV "
                "cache; lower it, or set enforce_eager to do without them"
            ) from None
