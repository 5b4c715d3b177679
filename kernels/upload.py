"""Asynchronous copies of numbers from the host to the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[np.int32] | NDArray[np.int64], device: torch.device) -> Tensor:
    """Return `values` as a tensor on `device`, in the order of the current stream.

    They may be changed at once: the copy is from a pinned buffer, which torch's pinned-memory
    allocator reuses only after the stream has passed the copy.
    """
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
