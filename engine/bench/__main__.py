"""`python -m engine.bench`: test the engine and the kernels on this machine's GPU; measure them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.bench.gpu.packages import PackageError, provide

PARTS = ("tests", "replays", "engine", "kernels", "transformers")
_ABOUT = (
    "Test the engine and the kernels on this machine's GPU, replay ragged steps, which must give "
    "the same bits each time, then measure. The engine has the settings of TRIDENT_* variables, "
    "such as TRIDENT_ENFORCE_EAGER=true, except those that a part sets."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return 0, or 1 if something failed, or 2 if a requirement is missing."""
    options = _options(arguments)
    try:
        with provide() as source:
            import torch

            if not torch.cuda.is_available() and not options.tiny:
                print("no CUDA device: --tiny shows that everything works without one")
                return 2
            if options.replay is not None:
                from engine.bench.gpu.replays.session import again

                return again(options.replay)
            from engine.bench.gpu.run import Run  # when the packages can be imported

            run = Run(options)
            run.say(source)
            return run.all()
    except PackageError as error:
        print(error)
        return 2


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine.bench", description=_ABOUT)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-results"),
        metavar="FOLDER",
        help="write results.json, report.md, failures.txt and progress.txt there as they come "
        "(default: gpu-results)",
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="time limit of the whole run (default: 9)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="default: all, in this order; without tests, what they would refuse is measured too",
    )
    parser.add_argument(
        "--replay",
        metavar="SEED",
        help="replay only this step many times, as printed when it gave other bits",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="check that everything works, on tiny models; also on a CPU",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
