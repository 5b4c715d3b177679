"""Memory in large pages, for what is read once per step: it misses the TLB with each page."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_CHUNK_BYTES = 64 * 2**20
_LINE_BYTES = 64  # of the cache, to which kernels want tensors aligned


def zeros_on_demand(num_bytes: int) -> Tensor:
    """Return zeros, uint8, of a mapping of their own, which lives as long as a part of the tensor.

    The system allocates its pages on the first write: large ones where it has them.
    """
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)


class LargePages:
    """Keeps tensors side by side in few mappings: they share large pages, and none is in part.

    A mapping is freed when all tensors in it are.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)  # of the last mapping

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor."""
        num_bytes = tensor.nbytes
        aligned = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        if aligned > len(self._rest):
            self._rest = zeros_on_demand(max(aligned, _CHUNK_BYTES))
        buffer, self._rest = self._rest[:num_bytes], self._rest[aligned:]
        copied: Tensor = buffer.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return copied
