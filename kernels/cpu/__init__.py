"""Kernels of the CPU in C++, where they have been built: `python -m kernels.cpu` builds them.

They lie in `csrc/`, run on torch's own threads, and are compiled once, at installation, for the
instructions of the machine. Nothing is ever compiled while serving: without them, or on a machine
that they were not built for, the forms in torch serve.
"""

from __future__ import annotations

from kernels.cpu.library import fast_operations, operations

__all__ = ["fast_operations", "operations"]
