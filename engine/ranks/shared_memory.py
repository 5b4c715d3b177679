"""SharedMemoryGroup: the ranks of a model on the CPU of one machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.library import operations


def shares_memory() -> bool:
    """Return whether there are kernels for it on this CPU."""
    return operations(torch.empty(0)) is not None


def allocate_shared_memory(size: int) -> int:
    """Return the file descriptor of memory for `size` ranks, with no name and no path.

    `shares_memory` must hold.
    """
    file = os.memfd_create("trident-ranks")
    os.ftruncate(file, _shared_sum().bytes(size))  # pages that nobody writes to take no memory
    return file


def _shared_sum() -> Any:
    """Return the class of csrc/shared_sum.h."""
    assert shares_memory()
    return torch.classes.trident_cpu.SharedSum


class SharedMemoryGroup:
    """A `RankGroup` of processes that have mapped the same memory."""

    sum_norm = None

    def __init__(self, file: int, rank: int, size: int, *, patience_s: float) -> None:
        """Be one of `size` ranks.

        Args:
            file: as `allocate_shared_memory` returned it; may be closed afterwards.
            patience_s: how long to wait for another rank within a step.
        """
        self.rank = rank
        self.size = size
        self.shared_sum = _shared_sum()(file, rank, size, patience_s)

    def sum(self, x: Tensor) -> Tensor:
        total: Tensor = self.shared_sum.sum(x)
        return total

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        found: Tensor = self.shared_sum.gather(x, list(widths))
        return found

    def share(self, token_ids: Tensor) -> Tensor:
        shared: Tensor = self.shared_sum.share(token_ids.contiguous())
        return shared

    def least(self, value: int) -> int:
        return int(self.shared_sum.all(torch.tensor([int(value)])).min())

    def first(self, value: int) -> int:
        return int(self.shared_sum.all(torch.tensor([int(value)]))[0, 0])

    def abort(self) -> None:
        """Have all ranks that wait for another one, now or later, raise `RuntimeError`."""
        self.shared_sum.abort()

    def wait_seconds(self) -> float:
        """Return how long this rank has waited for others; callable from any thread."""
        seconds: float = self.shared_sum.wait_seconds()
        return seconds
