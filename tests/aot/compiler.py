"""Compiles the kernels that a wrapper launches, for a GPU that need not be present.

Wrappers are called with tensors on the meta device: they choose tiles and grid as usual, and
instead of a launch the kernel is compiled for its arguments.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels import device

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# Matrix instructions, as they appear in PTX.
_MATRIX = {"tcgen05": "tcgen05.mma", "wgmma": "wgmma.mma_async", "mma": "mma.sync"}

# A100, L4, H100 / H200, B200 and RTX 5090; shared memory by CUDA's programming guide.
GPUS = {
    "sm_80": device.DeviceLimits(num_sms=108, shared_memory=166_912, capability=(8, 0)),
    "sm_89": device.DeviceLimits(num_sms=58, shared_memory=101_376, capability=(8, 9)),
    "sm_90": device.HOPPER,
    "sm_100": device.DeviceLimits(num_sms=148, shared_memory=232_448, capability=(10, 0)),
    "sm_120": device.DeviceLimits(num_sms=170, shared_memory=101_376, capability=(12, 0)),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel, compiled for one GPU.

    Attributes:
        kernel: name of the function.
        module: its module, such as kernels.rms_norm.
        constants: specialisation constants, by parameter.
        dtypes: distinct dtypes of its pointers, in Triton's names.
        gpu: key of GPUS.
        num_warps, num_stages: as launched.
        registers: per thread.
        stack: bytes per thread of local memory: arrays and spills.
        shared: bytes per block of threads.
        matrix: its matrix instructions: mma, wgmma, tcgen05 or none.
        ttgir: its last form in Triton's own language, with the layout of each tensor.
        cubin: the machine code.
    """

    kernel: str
    module: str
    constants: dict[str, Any]
    dtypes: tuple[str, ...]
    gpu: str
    num_warps: int
    num_stages: int
    registers: int
    stack: int
    shared: int
    matrix: str
    ttgir: str = field(repr=False)
    cubin: bytes = field(repr=False)

    @property
    def sass(self) -> str:
        """The machine code as text."""
        return _cuobjdump("-sass", self.cubin)


class _Driver:
    """The part of a driver that compilation needs."""

    def __init__(self, limits: device.DeviceLimits) -> None:
        major, minor = limits.capability
        self._capability = 10 * major + minor
        self._shared_memory = limits.shared_memory
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # Triton caches compiled kernels by device

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": self._shared_memory}


@contextmanager
def compiling_for(gpu: str) -> Iterator[list[Compiled]]:
    """Inside the block, launches compile for `gpu` instead, and append to the list."""
    limits = GPUS[gpu]
    compiled: dict[int, Compiled] = {}
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if id(kernel) not in compiled:
            compiled[id(kernel)] = _measure(gpu, kernel)
            found.append(compiled[id(kernel)])
        return kernel

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(device, "limits", return_value=limits),
        _active(_Driver(limits)),
    ):
        yield found


def compile_call(
    gpu: str, wrapper: Callable[..., object], *args: Any, **kwargs: Any
) -> list[Compiled]:
    """Return the kernels that `wrapper`, given tensors on the meta device, launches on `gpu`."""
    with compiling_for(gpu) as found:
        wrapper(*args, **kwargs)
    return found


@contextmanager
def _active(driver: _Driver) -> Iterator[None]:
    config = triton.runtime.driver
    before = config._active
    config.set_active(driver)
    try:
        yield
    finally:
        config._active = before


def _measure(gpu: str, kernel: Any) -> Compiled:
    usage = _cuobjdump("-res-usage", kernel.asm["cubin"])
    figures = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    names, types = kernel.src.fn.arg_names, kernel.src.signature.values()
    return Compiled(
        kernel=kernel.metadata.name,
        module=kernel.src.fn.module,
        constants={names[path[0]]: value for path, value in kernel.src.constants.items()},
        dtypes=tuple(dict.fromkeys(kind[1:] for kind in types if str(kind).startswith("*"))),
        gpu=gpu,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        registers=figures["REG"],
        stack=figures["STACK"] + figures["LOCAL"],
        shared=kernel.metadata.shared,
        matrix=next((name for name, found in _MATRIX.items() if found in kernel.asm["ptx"]), ""),
        ttgir=kernel.asm["ttgir"],
        cubin=kernel.asm["cubin"],
    )


def _cuobjdump(flag: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [_BIN / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True
        ).stdout
