"""Ranks as threads of one process: what they exchange stays in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

_PATIENCE_S = 60

T = TypeVar("T")


class ThreadGroups:
    """The groups of `size` ranks.

    Attributes:
        traces: by rank, the kind and shape of each exchange.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.traces: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(size)]
        self.given: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE_S)

    def run(self, rank: Callable[[ThreadGroup], T]) -> list[T]:
        """Return what `rank` returns in a thread for each rank; raises the first one's error."""
        with ThreadPoolExecutor(self.size) as pool:
            groups = [ThreadGroup(self, number) for number in range(self.size)]
            futures = [pool.submit(self._run, rank, group) for group in groups]
        errors = [error for each in futures if (error := each.exception()) is not None]
        # One that has failed breaks the barrier at which others wait.
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]

    def _run(self, rank: Callable[[ThreadGroup], T], group: ThreadGroup) -> T:
        try:
            return rank(group)
        except BaseException:
            self.barrier.abort()
            raise


class ThreadGroup:
    """A `RankGroup`, and its thread's view of all ranks."""

    shared_sum = None
    sum_norm = None

    def __init__(self, groups: ThreadGroups, rank: int) -> None:
        self._groups = groups
        self.rank = rank
        self.size = groups.size

    def sum(self, x: Tensor) -> Tensor:
        parts = self._exchange("sum", x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        assert x.shape[1] == widths[self.rank]
        parts = self._exchange("gather", x)
        return torch.cat(parts, 1) if self.rank == 0 else x

    def least(self, value: int) -> int:
        return min(int(each) for each in self._exchange("least", torch.tensor([value])))

    def first(self, value: int) -> int:
        return int(self._exchange("first", torch.tensor([value]))[0])

    def share(self, token_ids: Tensor) -> Tensor:
        return self._exchange("share", token_ids)[0]

    def _exchange(self, kind: str, x: Tensor) -> list[Tensor]:
        groups = self._groups
        shape = (x.shape[0],) if kind == "gather" else tuple(x.shape)
        groups.traces[self.rank].append((kind, shape))
        groups.given[self.rank] = x.clone()
        groups.barrier.wait()
        parts = list(groups.given)
        groups.barrier.wait()  # before one of them gives what comes next
        return parts
