"""A simulated GPU that only counts bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

GIB = 2**30


class Gpu:
    """A device of 80 GiB, in which torch's allocator keeps what is freed.

    Attributes:
        unused: bytes of segments that tensors take only a part of.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others = GIB
        self.libraries = 0
        self.allocated = self.unused = self.reserved = self.peak = 0
        functions: dict[str, Callable[..., object]] = {
            "mem_get_info": lambda _: (self.free, 80 * GIB),
            "memory_reserved": lambda _: self.reserved,
            "max_memory_reserved": lambda _: self.peak,
            "reset_peak_memory_stats": self._reset_peak,
            "empty_cache": self._empty_cache,
            "synchronize": lambda _: None,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    @property
    def free(self) -> int:
        return 80 * GIB - self.others - self.libraries - self.reserved

    def allocate(self, num_bytes: int) -> None:
        if self.allocated + num_bytes - self.reserved > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.allocated += num_bytes
        self.reserved = max(self.reserved, self.allocated + self.unused)
        self.peak = max(self.peak, self.reserved)

    def release(self, num_bytes: int) -> None:
        self.allocated -= num_bytes

    def _reset_peak(self, _: torch.device) -> None:
        self.peak = self.reserved

    def _empty_cache(self) -> None:
        self.reserved = self.allocated + self.unused
