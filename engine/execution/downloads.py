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


@dataclass(frozen=True, slots=True)
class _Landing:
    """Memory on the host for one copy at a time.

    Attributes:
        words: int32, pinned where there is a GPU.
        array: the same memory.
        event: comes after the copy; None where a copy is done when it is launched.
    """

    words: Tensor
    array: NDArray[np.int32]
    event: torch.cuda.Event | None


class Download(Protocol):
    """Results on their way to the host."""

    def wait(self) -> list[NDArray[Any]]:
        """Wait for them; return them as arrays."""


class Downloads:
    """The copies from one device. Their memory and events are few: those in flight at once."""

    def __init__(self, device: torch.device) -> None:
        """Allocate nothing yet."""
        self._is_cuda = device.type == "cuda"
        self._free: list[_Landing] = []

    def start(self, tensors: Sequence[Tensor]) -> Download:
        """Copy tensors that are not written again, behind the work launched so far.

        Does not wait for it. Tensors of 8 bytes per element must come first.
        """
        return self.copy(pack(tensors)) if self._is_cuda else _OnHost(tensors)

    def copy(self, packed: Packed) -> Download:
        """Copy `packed`, whose words may be overwritten by work that is launched later."""
        num_words = len(packed.words)
        landing = self._landing(num_words)
        words = landing.words
        if len(words) > num_words:
            words = words[:num_words]
        words.copy_(packed.words, non_blocking=True)
        if landing.event is not None:
            landing.event.record()
        return _Copy(self._free, landing, packed)

    def _landing(self, num_words: int) -> _Landing:
        if self._free and len((landing := self._free.pop()).words) >= num_words:
            return landing
        words = torch.empty(num_words, dtype=torch.int32, pin_memory=self._is_cuda)
        event = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        return _Landing(words, words.numpy(), event)


class _OnHost:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[NDArray[Any]]:
        return [tensor.numpy() for tensor in self._tensors]


class _Copy:
    def __init__(self, free: list[_Landing], landing: _Landing, packed: Packed) -> None:
        """Return `landing` to `free` after the copy of `packed`."""
        self._free = free
        self._landing: _Landing | None = landing
        self._num_words = len(packed.words)
        self._layout = packed.layout
        self._arrays: list[NDArray[Any]] = []

    def wait(self) -> list[NDArray[Any]]:
        if self._landing is not None:
            if self._landing.event is not None:
                self._landing.event.synchronize()
            words = self._landing.array[: self._num_words].copy()
            self._free.append(self._landing)
            self._landing = None
            start = 0
            for dtype, shape in self._layout:
                end = start + prod(shape) * dtype.itemsize // words.itemsize
                self._arrays.append(words[start:end].view(_DTYPES[dtype]).reshape(shape))
                start = end
        return self._arrays
