"""Host memory that is allocated on first use."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor


def zeroed_on_demand(shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros on the CPU whose pages the system allocates on the first write.

    Writing gigabytes of zeros takes seconds, and commits the memory before it is needed.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults and TLB misses
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).view(dtype).view(shape)
