"""Runs the engine's tests on a GPU, and tells whether figures of it would mean anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kernels.bench import testing
from kernels.bench.operations import Operation
from kernels.bench.testing import Outcome

FOLDER = Path(__file__).parents[2] / "tests" / "gpu"
REQUIRED = ("parity", "modes")  # what these files find wrong makes every figure worthless
_SHARDS = {"parity": 6, "modes": 4, "cancel": 2}  # processes, most of whose time is compiling


def run(deadline: float, say: Callable[[str], None]) -> dict[str, Outcome]:
    """Run them all; return the outcome by file: `parity` is that of test_parity.py.

    Args:
        deadline: as of time.time(); what has not ended by then has failed.
    """
    many = (os.cpu_count() or 1) >= sum(_SHARDS.values())
    files = [Operation(name, shards=count if many else 1) for name, count in _SHARDS.items()]
    return testing.run(files, deadline, say=say, folder=FOLDER)


def refusal(tests: dict[str, Outcome]) -> str | None:
    """Return why the engine is not to be measured; None if nothing speaks against it."""
    for name in REQUIRED:
        if not tests.get(name, Outcome()).green:
            return f"tests of {name} are not green"
    return None
