"""Asynchronous copies of numbers from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 4  # values: kernels take 16 bytes in one load


def upload(values: NDArray[np.int32] | NDArray[np.int64], device: torch.device) -> Tensor:
    """Return `values` as a tensor on `device`, in the order of the current stream.

    They may be changed at once: the copy is from a pinned buffer, which torch's pinned-memory
    allocator reuses only after the stream has passed the copy.
    """
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_together(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Return `arrays` as tensors on `device`, of the same shapes, by one `upload` at most."""
    sizes = [-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    starts = [0, *accumulate(sizes)]
    if not starts[-1]:
        return [torch.empty(array.shape, dtype=torch.int32, device=device) for array in arrays]
    buffer = np.zeros(starts[-1], dtype=np.int32)
    for start, array in zip(starts, arrays, strict=False):
        buffer[start : start + array.size] = array.ravel()
    tensor = upload(buffer, device)
    return [
        tensor[start : start + array.size].view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]
