"""Where a kernel runs, the device limits that launch settings depend on, and sizes of grids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

# With TRITON_INTERPRET=1 Triton runs kernels on the CPU, in NumPy: slow, for tests only.
INTERPRETED: bool = triton.knobs.runtime.interpret


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Device limits that determine tile sizes and grids.

    Attributes:
        num_sms: streaming multiprocessors.
        shared_memory: maximum bytes of shared memory per thread block.
        capability: compute capability, (9, 0) for an H200.
    """

    num_sms: int
    shared_memory: int
    capability: tuple[int, int]


# An H100 or H200: used by the interpreter and when kernels are compiled without a device.
HOPPER = DeviceLimits(num_sms=132, shared_memory=232_448, capability=(9, 0))


def has_triton(where: torch.device) -> bool:
    """Return whether Triton kernels run on that device.

    On the meta device kernels are compiled but not run.
    """
    return INTERPRETED or where.type != "cpu"


def multiplies_fp8(where: torch.device) -> bool:
    """Return whether a device with Triton has matrix instructions for FP8, since Ada."""
    return limits(where).capability >= (8, 9)


def converts_fp8(where: torch.device) -> bool:
    """Return whether kernels there have instructions that convert to FP8 and from it."""
    return multiplies_fp8(where) and not INTERPRETED


def runs_triton(tensor: Tensor) -> bool:
    """Return whether the Triton kernel processes `tensor`; otherwise the torch form does."""
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


def cdiv(size: int, block: int) -> int:
    """Return how many blocks `size` takes. `triton.cdiv` takes microseconds outside of kernels."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is not below `size`: 1 of 0."""
    return 1 << max(size - 1, 0).bit_length()
