"""Where a kernel runs, and what that device offers: all that a wrapper asks before a launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

# TRITON_INTERPRET=1 has Triton run its kernels on the CPU, in NumPy: slow, for tests.
INTERPRETED: bool = triton.knobs.runtime.interpret


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What the choice of tiles and grids depends on.

    Attributes:
        num_sms: streaming multiprocessors.
        shared_memory: bytes that one block of threads can have.
        capability: compute capability, (9, 0) for an H200.
    """

    num_sms: int
    shared_memory: int
    capability: tuple[int, int]


# Of an H100 or H200: what kernels are interpreted, and compiled without a device, for.
HOPPER = DeviceLimits(num_sms=132, shared_memory=232_448, capability=(9, 0))


def has_triton(where: torch.device) -> bool:
    """Tell whether Triton kernels run on that device.

    On the meta device, where nothing can be computed, they are only compiled.
    """
    return INTERPRETED or where.type != "cpu"


def runs_triton(tensor: Tensor) -> bool:
    """Tell whether the Triton kernel serves `tensor`; elsewhere the torch form does."""
    return has_triton(tensor.device)


@cache
def limits(device: torch.device) -> DeviceLimits:
    """Return the limits of `device`; those of an H200 where there is no GPU."""
    if device.type != "cuda":
        return HOPPER
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return DeviceLimits(
        num_sms=properties["multiprocessor_count"],
        shared_memory=properties["max_shared_mem"],
        capability=torch.cuda.get_device_capability(index),
    )
