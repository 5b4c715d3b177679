"""Host buffers through which weights go to a device whose memory files cannot be read into."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """A copy under way."""

    def synchronize(self) -> None:
        """Return when the source may be overwritten."""


class Copier(Protocol):
    """Moves weights from a host buffer to their place, casting them to its type."""

    pinned: bool  # whether the buffers must be page-locked

    def copy(self, source: Tensor, destination: Tensor) -> Transfer:
        """Start to copy `source` [n] on the host to `destination` [n]."""

    def finish(self) -> None:
        """Return when all copies are done."""


class CudaCopier:
    """Copies to a GPU on a stream of its own, so that nobody waits for PCIe; casts over there."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The memory of the parameters may still be in use by what came before them.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, source: Tensor, destination: Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            if source.dtype != destination.dtype:  # a copy that casts would do so on the host
                source = source.to(self._device, non_blocking=True)
            destination.copy_(source, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return done

    def finish(self) -> None:
        self._stream.synchronize()


@dataclass(slots=True)
class Buffer:
    """Memory of the host, uint8 [n]; `pending` may still be reading from it."""

    memory: Tensor
    pending: Transfer | None = None


class Staging:
    """Lends out buffers of `num_bytes` and sends what they hold. For one thread.

    It makes as many buffers as are lent out at the same time. The one that is lent next is the one
    sent longest ago, whose transfer has had the most time to end.
    """

    def __init__(self, copier: Copier, num_bytes: int) -> None:
        self._copier = copier
        self._num_bytes = num_bytes
        self._free: deque[Buffer] = deque()

    def lend(self) -> Buffer:
        """Return a buffer; whoever writes to it must wait for what is pending."""
        if self._free:
            return self._free.popleft()
        pinned = self._copier.pinned
        return Buffer(torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=pinned))

    def send(self, buffer: Buffer, dtype: torch.dtype, destination: Tensor) -> None:
        """Copy the first elements of a buffer, of type `dtype`, to `destination` [n]; take it back.

        The copy may go on after the return, until `finish`.
        """
        source = buffer.memory[: destination.numel() * dtype.itemsize].view(dtype)
        buffer.pending = self._copier.copy(source, destination)
        self._free.append(buffer)

    def finish(self) -> None:
        """Return when everything sent has arrived."""
        self._copier.finish()
