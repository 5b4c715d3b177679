"""CPU kernels in C++, built by `python -m kernels.cpu`.

The sources are in `csrc/`. They run on torch's threads and are compiled once, at installation, for
this machine's instruction set. Nothing is compiled while serving: without the built kernels, or on
a machine they were not built for, the torch implementations are used.
"""

from __future__ import annotations

from kernels.cpu.library import fast_operations, operations

__all__ = ["fast_operations", "operations"]
