"""`python -m kernels.bench`: test the kernels on this machine's GPU, then measure them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.bench import runner, testing
from kernels.bench.case import Case
from kernels.bench.machine import machine
from kernels.bench.operations import OPERATIONS, all_cases
from kernels.bench.report import Report
from kernels.device import INTERPRETED

_TEST_SHARE = 0.6  # maximum share of the time; the rest is for measuring


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return 0, or 1 if a test or a case failed, or 2 if there is no GPU."""
    options = _options(arguments)
    if INTERPRETED:
        print("TRITON_INTERPRET is set: unset it, the kernels must run on the GPU")
        return 2
    if not torch.cuda.is_available():
        print("no CUDA device: see kernels/README.md for what runs without one")
        return 2
    started = time.time()
    seconds = 60 * options.minutes

    def say(text: str) -> None:
        print(f"[{time.time() - started:5.1f} s] {text}", flush=True)

    tests_end = started + _TEST_SHARE * seconds
    groups = [[case.key for case in operation.cases()] for operation in OPERATIONS]
    with runner.compiling(groups, tests_end):
        tests = testing.run(OPERATIONS, tests_end, say=say)
    refused = refusals(tests)
    keys = [case.key for case in all_cases() if case.operation not in refused]
    figures = runner.measure(keys, started + seconds, say=say)
    report = Report(
        machine=machine(),
        ceilings=figures.ceilings,
        tests=tests,
        cases=in_order(refused, figures.cases),
    )
    if options.json:
        report.write_json(options.json)
    print("\n".join(report.lines(options.profile)))
    return int(report.faulty)


def refusals(tests: dict[str, testing.Outcome]) -> dict[str, str]:
    """Return the operations that must not be measured, and why."""
    reasons = {operation.name: testing.refusals(operation, tests) for operation in OPERATIONS}
    return {name: reason for name, reason in reasons.items() if reason}


def in_order(
    refused: dict[str, str], figures: dict[str, dict[str, Any]]
) -> list[tuple[Case, dict[str, Any]]]:
    """Return all cases in the order of the list, with their figures or why there are none."""
    return [
        (case, {"status": "refused", "reason": refused[operation.name]})
        if operation.name in refused
        else (case, figures[case.key])
        for operation in OPERATIONS
        for case in operation.cases()
    ]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="no case begins after this time (default: 5)"
    )
    parser.add_argument(
        "--profile",
        action="append",
        default=[],
        choices=[operation.name for operation in OPERATIONS],
        help="list the registers, shared memory and occupancy of this operation's kernels",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
