"""`python -m engine.bench`: test the engine and the kernels on this machine's GPU; measure them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.bench.gpu.run import Run

_KINDS = ("tests", "engine", "kernels")
_ABOUT = (
    "Test the engine and the kernels on this machine's GPU, then run the benchmarks. The engine "
    "takes its settings from TRIDENT_* variables, such as TRIDENT_ENFORCE_EAGER=true, unless a "
    "benchmark sets them itself."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return 0, or 1 if something failed, or 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench", description=_ABOUT)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-results"),
        metavar="FOLDER",
        help="folder that gets report.md, results.json and logs during the run (default: "
        "gpu-results)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="time limit of the whole run in minutes (default: 9)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=_KINDS,
        default=_KINDS,
        help="parts to run; default: all, in this order",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="check that every part runs, on tiny models; works on a CPU too",
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not options.tiny:
        print("no CUDA device: --tiny shows that everything works without one")
        return 2
    return Run(options).all()


if __name__ == "__main__":
    sys.exit(main())
