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
    "Test the engine and the kernels on this machine's GPU, then measure. The engine has the "
    "settings of TRIDENT_* variables, such as TRIDENT_ENFORCE_EAGER=true, except those that a part "
    "sets."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return 0, or 1 if something failed, or 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench", description=_ABOUT)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-results"),
        metavar="FOLDER",
        help="write report.md, results.json and logs there as they come (default: gpu-results)",
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="time limit of the whole run (default: 9)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=_KINDS, default=_KINDS, help="default: all, in this order"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="check that everything works, on tiny models; also on a CPU",
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not options.tiny:
        print("no CUDA device: --tiny shows that everything works without one")
        return 2
    return Run(options).all()


if __name__ == "__main__":
    sys.exit(main())
