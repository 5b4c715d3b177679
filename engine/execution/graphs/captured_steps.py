"""The CUDA graphs of a model: forward passes, and the plain sampling after them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from engine.errors import InsufficientMemoryError
from engine.execution.graphs.graph_sizes import (
    GraphSizes,
    StepTime,
    decode_sizes,
    mixed_sizes,
    time_step,
)
from engine.execution.graphs.sample_graphs import SampleGraphs
from engine.execution.graphs.step_graphs import Capturer, Rows, StepGraphs
from engine.execution.memory.step_memory import is_out_of_memory
from kernels.step.slot_tables import SlotTables


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
    forward: Rows, max_num_seqs: int, max_num_batched_tokens: int, device: torch.device
) -> GraphSizes:
    """Return for which steps a model gets graphs, from their times without attention."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def time_mixed_step(num_tokens: int) -> StepTime:
        num_rows = min(num_tokens, max_num_seqs)
        run = partial(run_padding, forward, num_rows, num_tokens, None, device)
        return time_step(run, synchronize)

    mixed = mixed_sizes(max_num_batched_tokens, time_mixed_step)
    return GraphSizes(decode_sizes(max_num_seqs), mixed)


class CapturedSteps:
    """All graphs of one model.

    Attributes:
        forward: runs forward passes.
        sampling: samples after one of them.
        num_graphs: how many there are.
    """

    def __init__(
        self,
        forward: Rows,
        compute_logits: Callable[[Tensor], Tensor],
        capturer: Capturer,
        tables: SlotTables,
        *,
        hidden: Tensor,
        sizes: GraphSizes,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Capture them; `on_progress` is called with (captured, total).

        Args:
            forward, compute_logits: are captured.
            tables: hold the rows of a step.
            hidden: [max_num_seqs, hidden_size], for the last hidden state of each row.
            sizes: of the steps that are captured.

        Raises:
            InsufficientMemoryError: the device has no memory left for them.
        """
        slots = torch.full((len(hidden),), -1, dtype=torch.int32, device=hidden.device)
        self.forward = StepGraphs(forward, tables, (hidden, slots), sizes)
        # The same sizes as of decode steps: no graph samples for rows that its step does not have.
        self.sampling = SampleGraphs(compute_logits, tables, hidden, slots, sizes.decode)
        self.num_graphs = total = self.forward.num_graphs + self.sampling.num_graphs
        captures = chain(self.forward.capture(capturer), self.sampling.capture(capturer))
        try:
            for done, _ in enumerate(captures, 1):
                on_progress(done, total)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise InsufficientMemoryError(
                f"gpu_memory_utilization: no memory is left for {total} CUDA graphs beside the KV "
                "cache; lower it, or set enforce_eager to do without them"
            ) from None
