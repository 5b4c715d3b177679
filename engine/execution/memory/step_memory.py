"""Out of memory in a step, as an error that ends its requests and says what to set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from engine.core.schedule import Schedule
from engine.errors import StepOutOfMemoryError

T = TypeVar("T")


def with_memory(schedule: Schedule, device: torch.device, work: Callable[[], T]) -> T:
    """Do a part of the step `schedule`.

    Raises:
        StepOutOfMemoryError: `device` has no memory for it.
    """
    try:
        return work()
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
    # Not within the handler: the other error would keep the tensors of the step alive.
    raise StepOutOfMemoryError(
        f"out of memory on {device} in a step of {schedule.num_rows} sequences and "
        f"{schedule.total_num_tokens} tokens ({reason}); lower gpu_memory_utilization to leave "
        "more beside the KV cache, or max_num_batched_tokens or max_num_seqs for smaller steps"
    )
