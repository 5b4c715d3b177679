"""How the ranks of one machine exchange: in shared memory, or by torch's collectives.

Those are NCCL's on GPUs, and gloo's on a CPU without our kernels. GPUs that read each other's
memory make small sums by kernels of ours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed
from torch import Tensor

from engine.config.engine_config import EngineConfig
from engine.layers.rank_group import RankGroup
from engine.ranks import symmetric_memory
from engine.ranks.shared_memory import SharedMemoryGroup, allocate_shared_memory, shares_memory
from kernels.collectives.peers import Peers
from kernels.collectives.rank_sum import MOST_BYTES, MOST_ROW_BYTES, rank_sum, rank_sum_norm
from kernels.rms_norm import rms_norm_add

dist: Any = torch.distributed  # whose types leave out half of what is used here


# Up to so many bytes one shot makes a sum of three ranks and more, and up to MOST_BYTES two do; of
# two ranks one shot makes both. NCCL makes larger ones. Not measured: kernels like these beat NCCL
# up to 400 KB on eight H100 (meta-pytorch/kraken). `python -m engine.bench.ranks` prints where the
# times cross.
ONE_SHOT_BYTES = 2**18
_OUT_OF_REACH = "another rank of the model is out of reach"

# Rank 0 chooses, for all.
Exchange = Literal["shared_memory", "collectives"]


class ProcessRanks(RankGroup, Protocol):
    """A `RankGroup` of processes."""

    def abort(self) -> None:
        """Have ranks that wait for another one, now or later, raise `RuntimeError`.

        With collectives, those that have ended do.
        """

    def wait_seconds(self) -> float:
        """Return how long this rank has waited for others; callable from any thread."""


def allocate_exchange(size: int, device: torch.device) -> tuple[Exchange, int]:
    """Return how `size` ranks exchange, and the file descriptor of the memory that it takes."""
    if device.type == "cpu" and shares_memory():
        return "shared_memory", allocate_shared_memory(size)
    return "collectives", allocate_store()


def join_ranks(
    exchange: Exchange, memory: int, rank: int, config: EngineConfig, device: torch.device
) -> ProcessRanks:
    """Be `rank` of a model; with collectives, wait for the others.

    Raises:
        RuntimeError: another rank does not come.
    """
    size, patience_s = config.tensor_parallel_size, config.step_timeout_s
    if exchange == "shared_memory":
        return SharedMemoryGroup(memory, rank, size, patience_s=patience_s)
    return CollectiveGroup(
        memory,
        rank,
        size,
        device=device,
        patience_s=patience_s,
        deterministic=config.deterministic,
    )


def allocate_store() -> int:
    """Return the file descriptor of memory in which ranks of this machine find each other."""
    return os.memfd_create("trident-ranks")


class CollectiveGroup:
    """A `RankGroup` of processes of one machine, each with its device.

    Gloo and kernels of ours add in the order of the ranks, in float32. NCCL adds in the dtype of
    what is added, in an order of its own, unless that must not depend on the shape; the sum has the
    same bits at every rank, since each part of it is added at one and sent to the others.

    Attributes:
        peers: what our kernels need; None: the backend makes all sums.
    """

    shared_sum = None
    sum_norm: Any = None

    def __init__(
        self,
        file: int,
        rank: int,
        size: int,
        *,
        device: torch.device,
        patience_s: float,
        deterministic: bool = False,
    ) -> None:
        """Be one of `size` ranks; waits for the others.

        Args:
            file: as `allocate_store` returned it; may be closed afterwards.
            device: a GPU for NCCL, a CPU for gloo.
            patience_s: how long to wait for another rank.
            deterministic: a sum of rows does not depend on how many there are.
        """
        self.rank = rank
        self.size = size
        self._device = device
        self._wait_s = 0.0
        # By its number it has a path without having a name.
        store = dist.FileStore(f"/proc/self/fd/{os.dup(file)}", size)
        store.set_timeout(timedelta(seconds=patience_s))
        self._backend = _backend(store, rank, size, device, timedelta(seconds=patience_s))
        self._adds_in_order = deterministic or isinstance(self._backend, dist.ProcessGroupGloo)
        self._has_aborted = False
        self.peers: Peers | None = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                own = dist.PrefixStore("symmetric-memory", store)
                self.use_peers(
                    symmetric_memory.join_if_all_can(own, rank, size, device, self.least)
                )

    def use_peers(self, peers: Peers | None) -> None:
        """Make small sums by kernels of ours, as all ranks do then; None: make none."""
        self.peers = peers
        self.sum_norm = None if peers is None else self._sum_norm

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self.peers is not None and x.nbytes <= MOST_BYTES:
            self._check()
            return rank_sum(x, self.peers, is_two_shot=not self._is_one_shot(x))
        if not self._adds_in_order:
            self._wait(self._backend.allreduce([x]))
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(self._backend.allgather([parts], [x]))
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def _sum_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        is_short = x.shape[1] * x.element_size() <= MOST_ROW_BYTES
        if self.peers is not None and self._is_one_shot(x) and is_short:
            self._check()
            return rank_sum_norm(
                x.contiguous(), residual, weight, eps, self.peers, unit_offset=unit_offset
            )
        return rms_norm_add(self.sum(x), residual, weight, eps, unit_offset=unit_offset)

    def _is_one_shot(self, x: Tensor) -> bool:
        """Return whether it is faster; both have the same bits."""
        return x.nbytes <= (MOST_BYTES if self.size == 2 else ONE_SHOT_BYTES)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        padded = x.new_zeros(len(x), max(widths))  # all ranks give as much
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._wait(self._backend.gather([parts] if parts else [], [padded], options))
        if not parts:
            return x
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def share(self, token_ids: Tensor) -> Tensor:
        token_ids = token_ids.contiguous()
        self._wait(self._backend.broadcast([token_ids], dist.BroadcastOptions()))
        return token_ids

    def least(self, value: int) -> int:
        found = torch.tensor([int(value)], device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._wait(self._backend.allreduce([found], options))
        return int(found)

    def first(self, value: int) -> int:
        return int(self.share(torch.tensor([int(value)], device=self._device)))

    def abort(self) -> None:
        """Have this rank wait for no other one any more, if the backend can; killing them can."""
        self._has_aborted = True
        if self._device.type == "cuda":
            if self.peers is not None:
                symmetric_memory.abort(self.peers)
            self._backend.abort()

    def _check(self) -> None:
        if self._has_aborted:
            raise RuntimeError(_OUT_OF_REACH)

    def wait_seconds(self) -> float:
        """Return how long this rank's thread has waited for others; callable from any thread."""
        return self._wait_s

    def _wait(self, work: Any) -> None:
        """Wait for an exchange; on a GPU what is launched later does, not this thread.

        Raises:
            RuntimeError: another rank has ended or does not answer.
        """
        began = time.perf_counter()
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(_OUT_OF_REACH) from error
        self._wait_s += time.perf_counter() - began


def _backend(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    # Not what the machine's name stands for, which may be another network, or nothing.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, size, options)
