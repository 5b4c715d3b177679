"""`python -m kernels.cpu`: build the CPU kernels for this machine, unless they are built already.

With `--all`, builds for every supported instruction set, for an image that is built on one machine
and run on others. The exit status is 1 if the build fails; the server then uses torch's own
operations.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from kernels.cpu.build import BuildError, build
from kernels.cpu.library import library_path
from kernels.cpu.target import TARGETS, targets


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu", description=__doc__)
    parser.add_argument(
        "--all",
        action="store_true",
        help="build for every supported instruction set, not only this CPU's",
    )
    wanted = TARGETS if parser.parse_args().all else targets()[:1]
    if not wanted:
        print("CPU kernels: none for this processor, which lacks AVX2; torch's operations serve.")
        return 1
    for target in wanted:
        path = library_path(target)
        if path.exists():
            print(f"CPU kernels: {path.name} is up to date.")
            continue
        print(f"CPU kernels: building for {target.name}, torch {torch.__version__}", flush=True)
        start = time.monotonic()
        try:
            build(target)
        except BuildError as error:
            print(f"CPU kernels: not built, so torch's operations serve, slower on a CPU: {error}")
            return 1
        print(f"CPU kernels: built {path.name} in {time.monotonic() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
