"""Host staging buffers for weights on a device that files cannot be read into directly."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """A copy in progress."""

    def synchronize(self) -> None:
        """Wait until the source may be overwritten."""


class Copier(Protocol):
    """Copies weights from a host buffer to their destination, casting them to its dtype."""

    pinned: bool  # whether the buffers must be page-locked

    def copy(self, source: Tensor, destination: Tensor) -> Transfer:
        """Start to copy `source` on the host to `destination`, of the same shape."""

    def finish(self) -> None:
        """Wait until all copies are done."""


class CudaCopier:
    """Copies to a GPU on a separate stream, so that no thread waits for PCIe; casts on the GPU."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The parameters' memory may still be in use by earlier work of the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, source: Tensor, destination: Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            if source.dtype != destination.dtype:  # a copy that also casts would cast on the host
                source = source.to(self._device, non_blocking=True)
            destination.copy_(source, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return done

    def finish(self) -> None:
        self._stream.synchronize()


@dataclass(slots=True)
class Buffer:
    """Host memory, uint8 [n]; `pending` is the copy that may still be reading from it."""

    memory: Tensor
    pending: Transfer | None = None


class Staging:
    """A pool of host buffers of `num_bytes`. Not thread-safe.

    It has as many buffers as are lent at the same time, and lends the one sent longest ago, whose
    transfer is the most likely to be done.
    """

    def __init__(self, copier: Copier, num_bytes: int) -> None:
        self._copier = copier
        self._num_bytes = num_bytes
        self._free: deque[Buffer] = deque()

    def lend(self) -> Buffer:
        """Return a buffer; the caller must wait for `pending` before writing to it."""
        if self._free:
            return self._free.popleft()
        pinned = self._copier.pinned
        return Buffer(torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=pinned))

    def send(self, buffer: Buffer, dtype: torch.dtype, destination: Tensor) -> None:
        """Start to copy a buffer's first elements, of type `dtype`, to `destination`; reuse it.

        The copy may continue after the return, until `finish`.
        """
        source = (
            buffer.memory[: destination.numel() * dtype.itemsize]
            .view(dtype)
            .view(destination.shape)
        )
        buffer.pending = self._copier.copy(source, destination)
        self._free.append(buffer)

    def finish(self) -> None:
        """Wait until all copies are done."""
        self._copier.finish()
