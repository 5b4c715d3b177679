"""Reserved but mostly unmapped memory, for indices that exceed 32 bits."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

from tests.kernels.support import DEVICE

_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python defines from 3.13 on


def vast_zeros(num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes], zero; on the CPU pages use memory only once written."""
    if DEVICE.type == "cuda":
        if torch.cuda.mem_get_info()[0] < num_bytes + 2**30:
            pytest.skip(f"needs {num_bytes / 2**30:.0f} GiB of GPU memory")
        return torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)
