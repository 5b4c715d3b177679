"""What the launched kernels take of a multiprocessor, for a reader who wonders what bounds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What the blocks on one multiprocessor share: threads, registers, bytes of shared memory."""

    threads: int
    registers: int
    shared: int

    @classmethod
    def of(cls, device: torch.device) -> Multiprocessor:
        """Return that of a CUDA device."""
        found = torch.cuda.get_device_properties(device)
        return cls(
            threads=found.max_threads_per_multi_processor,
            registers=65536,  # of every GPU since Kepler
            shared=found.shared_memory_per_multiprocessor,
        )

    def warps(self, *, num_warps: int, registers: int, shared: int) -> int:
        """Return how many warps can be resident, by CUDA's rules of allocation.

        Registers are given out to warps in units of 256; a block takes 1 KiB of shared memory
        beside its own.
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
    """Within, the kernels that are launched are put down under their names."""
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
