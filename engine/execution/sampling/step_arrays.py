"""Upload of arrays from host to device: those of a step, and those of a request."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.upload import upload

Array = NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32]

_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
_ALIGNMENT = 4  # words of int32: kernels take 16 bytes in one load


class Part(NamedTuple):
    """Offset and size of an array in the buffer of its step, in words of int32."""

    start: int
    size: int
    dtype: torch.dtype


class StepArrays:
    """The host arrays of a step: gathered first, then uploaded in one copy."""

    def __init__(self) -> None:
        """Start empty."""
        self._arrays: list[tuple[int, NDArray[np.int32]]] = []
        self._size = 0

    def add(self, values: Array) -> Part:
        """Add `values`, of one dimension, which must not change before the upload."""
        words = values.view(np.int32)
        part = Part(self._size, len(words), _DTYPES[values.dtype])
        self._arrays.append((part.start, words))
        self._size += -(-len(words) // _ALIGNMENT) * _ALIGNMENT
        return part

    def upload(self, device: torch.device) -> DeviceArrays:
        """Upload all arrays to `device` on the current stream, without waiting."""
        if not self._arrays:
            return DeviceArrays(torch.empty(0, dtype=torch.int32, device=device))
        # Not empty either: a view of no values as int64 needs a stride.
        buffer = np.zeros(max(self._size, _ALIGNMENT), dtype=np.int32)
        for start, words in self._arrays:
            buffer[start : start + len(words)] = words
        return DeviceArrays(upload(buffer, device))


class DeviceArrays:
    """The arrays of a step on the device."""

    def __init__(self, buffer: Tensor) -> None:
        """Views of `buffer`, int32."""
        self._buffer = buffer

    def __getitem__(self, part: Part) -> Tensor:
        """Return the array for which `StepArrays.add` returned `part`."""
        return self._buffer[part.start : part.start + part.size].view(part.dtype)


class RequestArray:
    """An array of a request, uploaded by the first step that needs it and kept on the device."""

    def __init__(self, values: Array) -> None:
        """Keep `values`, of one dimension, which must not change any more."""
        self._values = values
        self._tensor: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._values)

    def on(self, device: torch.device) -> Tensor:
        """Return the values on `device`, always the same one."""
        if self._tensor is None:
            words = upload(self._values.view(np.int32), device)
            self._tensor = words.view(_DTYPES[self._values.dtype])
        return self._tensor
