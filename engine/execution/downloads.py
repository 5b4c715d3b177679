"""Copies of a step's results to the host: one transfer each, to pinned memory that is reused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DTYPES: dict[torch.dtype, type[np.generic]] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}


class Packed(NamedTuple):
    """Tensors one after the other.

    Attributes:
        words: int32 [N].
        layout: dtype and shape of each tensor, in order.
    """

    words: Tensor
    layout: tuple[tuple[torch.dtype, tuple[int, ...]], ...]


def pack(tensors: Sequence[Tensor]) -> Packed:
    """Return `tensors` in one; those of 8 bytes per element must come first."""
    words = torch.cat([tensor.reshape(-1).view(torch.int32) for tensor in tensors])
    return Packed(words, tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors))


class Event(Protocol):
    """Marks a place in the work of a device."""

    def record(self) -> None:
        """Mark the place after all work so far."""

    def synchronize(self) -> None:
        """Wait until the device has come to the place."""


class _NoEvent:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Landing:
    """Memory on the host for one copy at a time, and the event after it."""

    words: Tensor
    event: Event


class Downloads:
    """The copies from one device. Their memory and events are few: those in flight at once."""

    def __init__(self, device: torch.device) -> None:
        """Allocate nothing yet."""
        self._is_cuda = device.type == "cuda"
        self._free: list[_Landing] = []

    def start(self, packed: Packed) -> Download:
        """Copy `packed` behind the work launched so far, without waiting for it.

        Its words may be overwritten by work that is launched later.
        """
        landing = self._landing(len(packed.words))
        landing.words[: len(packed.words)].copy_(packed.words, non_blocking=True)
        landing.event.record()
        return Download(self._free, landing, packed)

    def _landing(self, num_words: int) -> _Landing:
        if self._free and len((landing := self._free.pop()).words) >= num_words:
            return landing
        # A power of two: the next results may be somewhat larger.
        size = 1 << max(num_words - 1, 0).bit_length()
        words = torch.empty(size, dtype=torch.int32, pin_memory=self._is_cuda)
        event: Event = _NoEvent()
        if self._is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return _Landing(words, event)


class Download:
    """A copy to the host."""

    def __init__(self, free: list[_Landing], landing: _Landing, packed: Packed) -> None:
        """Return `landing` to `free` after the copy of `packed`."""
        self._free = free
        self._landing: _Landing | None = landing
        self._words = np.empty(0, dtype=np.int32)
        self._num_words = len(packed.words)
        self._layout = packed.layout

    def wait(self) -> list[NDArray[Any]]:
        """Wait for the copy; return the tensors as arrays."""
        if self._landing is not None:
            self._landing.event.synchronize()
            self._words = self._landing.words[: self._num_words].numpy().copy()
            self._free.append(self._landing)
            self._landing = None
        found, start = [], 0
        for dtype, shape in self._layout:
            end = start + prod(shape) * dtype.itemsize // self._words.itemsize
            found.append(self._words[start:end].view(_DTYPES[dtype]).reshape(shape))
            start = end
        return found
