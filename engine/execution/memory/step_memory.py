"""Out of memory in a step, as an error that ends its requests and names the setting to lower."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from engine.core.schedule import SchedulerOutput
from engine.errors import StepOutOfMemoryError

T = TypeVar("T")

# What is in the texts of those who have no class of their own for it: CUDA and Triton, cuBLAS,
# cuDNN, torch's allocators on a CPU, and C++.
_SIGNS = (
    "out of memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether `error` means that the memory of the device or of the host is used up."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, StepOutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def with_memory(schedule: SchedulerOutput, device: torch.device, work: Callable[[], T]) -> T:
    """Do a part of the step `schedule`.

    Raises:
        StepOutOfMemoryError: `device` has no memory for it.
    """
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
    # Not within the handler: the other error would keep the tensors of the step alive.
    cache_size = "kv_cache_memory_bytes" if device.type == "cpu" else "gpu_memory_utilization"
    raise StepOutOfMemoryError(
        f"out of memory on {device} in a step of {schedule.num_rows} sequences and "
        f"{schedule.total_num_tokens} tokens ({reason}); lower {cache_size} to leave more memory "
        "beside the KV cache, or lower max_num_batched_tokens or max_num_seqs for smaller steps"
    )
