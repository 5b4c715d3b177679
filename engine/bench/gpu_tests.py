"""Runs the engine's tests on a GPU, and decides whether its figures are meaningful."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kernels.bench import testing
from kernels.bench.operations import Operation
from kernels.bench.testing import Outcome

FOLDER = Path(__file__).parents[2] / "tests" / "gpu"
REQUIRED = ("parity", "modes")  # failures in these files invalidate every figure
_SHARDS = {"parity": 6, "modes": 4, "cancel": 2}  # processes per file, mostly compiling


def run(deadline: float, say: Callable[[str], None]) -> dict[str, Outcome]:
    """Run all; return the outcome by file: `parity` is that of test_parity.py.

    Args:
        deadline: by time.time(); tests still running then have failed.
    """
    many = (os.cpu_count() or 1) >= sum(_SHARDS.values())
    files = [Operation(name, shards=count if many else 1) for name, count in _SHARDS.items()]
    return testing.run(files, deadline, say=say, folder=FOLDER)


def refusal(tests: dict[str, Outcome]) -> str | None:
    """Return why the engine must not be measured; None if it may be."""
    for name in REQUIRED:
        if not tests.get(name, Outcome()).green:
            return f"tests of {name} are not green"
    return None
