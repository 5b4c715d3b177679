"""Memory on the host that is there when it is first used."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor


def zeroed_on_demand(shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros on the CPU whose pages the system provides when they are written to.

    To write gigabytes of zeros takes seconds, and the memory is gone before anybody needs it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer to be provided, and to be looked up
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).view(dtype).view(shape)
