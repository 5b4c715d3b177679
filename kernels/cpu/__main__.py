"""`python -m kernels.cpu`: build the kernels of the CPU for this machine, unless they are there.

It ends with 1 if it cannot; the server then runs on torch's own operations.
"""

from __future__ import annotations

import sys
import time

import torch

from kernels.cpu.build import BuildError, build
from kernels.cpu.library import library_path
from kernels.cpu.target import targets


def main() -> int:
    found = targets()
    if not found:
        print("CPU kernels: none for this processor, which lacks AVX2; torch's operations serve.")
        return 1
    target = found[0]
    path = library_path(target)
    if path.exists():
        print(f"CPU kernels: {path.name} is up to date.")
        return 0
    print(f"CPU kernels: building for {target.name} and torch {torch.__version__}", flush=True)
    start = time.monotonic()
    try:
        build(target)
    except BuildError as error:
        print(
            f"CPU kernels: not built: {error}\n"
            "The server runs without them, on torch's operations, and slower on a CPU."
            " `python -m kernels.cpu` tries again."
        )
        return 1
    print(f"CPU kernels: built {path.name} in {time.monotonic() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
