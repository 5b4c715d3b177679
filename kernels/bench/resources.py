"""Resources of launched kernels: registers, shared memory and occupancy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Resources of one SM: threads, registers, bytes of shared memory."""

    threads: int
    registers: int
    shared: int

    @classmethod
    def of(cls, device: torch.device) -> Multiprocessor:
        """Return those of a CUDA device."""
        found = torch.cuda.get_device_properties(device)
        return cls(
            threads=found.max_threads_per_multi_processor,
            registers=65536,  # on every GPU since Kepler
            shared=found.shared_memory_per_multiprocessor,
        )

    def warps(self, *, num_warps: int, registers: int, shared: int) -> int:
        """Return the resident warps (occupancy), by CUDA's allocation rules.

        Registers are allocated to warps in units of 256; the driver reserves 1 KiB of shared memory
        per block.
        """
        per_warp = -(-32 * max(registers, 1) // 256) * 256
        blocks = min(
            self.threads // (32 * num_warps),
            self.registers // per_warp // num_warps,
            self.shared // (shared + 1024),
        )
        return blocks * num_warps


@contextmanager
def launches() -> Iterator[dict[str, Any]]:
    """Record kernels launched inside the block, by name."""
    found: dict[str, Any] = {}
    run = JITFunction.run

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **kwargs)
        module = self.fn.__module__.removeprefix("kernels.")
        found[f"{module}.{self.fn.__name__}"] = kernel
        return kernel

    JITFunction.run = recording
    try:
        yield found
    finally:
        JITFunction.run = run


def describe(kernels: dict[str, Any], processor: Multiprocessor) -> list[dict[str, Any]]:
    """Return the resources of launched kernels; spills and registers are per thread."""
    rows = []
    for name, kernel in kernels.items():
        if getattr(kernel, "n_regs", None) is None:
            continue  # interpreted
        taken = {
            "num_warps": kernel.metadata.num_warps,
            "registers": kernel.n_regs,
            "shared": kernel.metadata.shared,
        }
        rows.append(
            {
                "kernel": name,
                **taken,
                "num_stages": kernel.metadata.num_stages,
                "spills": kernel.n_spills,
                "resident_warps": processor.warps(**taken),
                "most_warps": processor.threads // 32,
            }
        )
    return rows
