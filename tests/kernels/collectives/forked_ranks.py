"""Ranks as forked processes: what they share lies at the same addresses in all of them."""

from __future__ import annotations

import io
import mmap
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from kernels.collectives.peers import BUFFER_BYTES, PROGRAMS, SIGNAL_BYTES, Peers

_PATIENCE_S = 60

T = TypeVar("T")


def shared_zeros(num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes], zero, that processes forked from this one share with it."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


class ForkedRanks:
    """The memory of `size` ranks, which outlives the processes that use it.

    Attributes:
        peers: of each rank.
    """

    def __init__(self, size: int) -> None:
        self._memory = [shared_zeros(BUFFER_BYTES).fill_(0xFF) for _ in range(size)]  # NaNs
        self._signals = [shared_zeros(SIGNAL_BYTES) for _ in range(size)]
        buffers, signals = (
            torch.tensor([each.data_ptr() for each in memory])
            for memory in (self._memory, self._signals)
        )
        self.peers = [
            Peers(
                rank,
                size,
                buffers,
                signals,
                shared_zeros(4 * PROGRAMS).view(torch.int32),
                shared_zeros(4).view(torch.int32),
            )
            for rank in range(size)
        ]

    def run(self, call: Callable[[Peers], T], delays: Sequence[float] = (0.0,)) -> list[T]:
        """Return what `call` returns for each rank, in a process of its own, at the same time.

        Args:
            delays: seconds, one of which passes whenever a kernel has signalled or seen signals.
        """
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in self.peers]
        processes = [
            context.Process(target=_run, args=(call, peers, delays, theirs), daemon=True)
            for peers, (_, theirs) in zip(self.peers, pipes, strict=True)
        ]
        for process in processes:
            process.start()
        try:
            for number, (ours, _) in enumerate(pipes):
                assert ours.poll(_PATIENCE_S), f"rank {number} does not end"
            received = [ours.recv_bytes() for ours, _ in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        found = [torch.load(io.BytesIO(each), weights_only=False) for each in received]
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found


def _run(
    call: Callable[[Peers], object], peers: Peers, delays: Sequence[float], results: Connection
) -> None:
    torch.set_num_threads(1)  # the threads of the parent are not here
    draw, atomic = random.Random(peers.rank), InterpreterBuilder.create_atomic_rmw

    def create_atomic_rmw(*arguments: Any) -> Any:
        found = atomic(*arguments)
        time.sleep(draw.choice(delays))  # 0 lets another rank run: there are more than cores
        return found

    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw
    try:
        answer = call(peers)
    except BaseException as error:
        answer = error
    content = io.BytesIO()
    torch.save(answer, content)
    results.send_bytes(content.getvalue())
