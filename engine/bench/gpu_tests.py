"""Runs the engine's tests on a GPU, and tells whether figures of it would mean anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kernels.bench import testing
from kernels.bench.testing import Outcome

FOLDER = Path(__file__).parents[2] / "tests" / "gpu"
REQUIRED = ("parity", "modes")  # what these files find wrong makes every figure worthless


def run(deadline: float, say: Callable[[str], None]) -> dict[str, Outcome]:
    """Run them all; return the outcome by file: `parity` is that of test_parity.py.

    Args:
        deadline: as of time.time(); what has not ended by then has failed.
    """
    return testing.run([], deadline, say=say, folder=FOLDER)


def refusal(tests: dict[str, Outcome]) -> str | None:
    """Return why the engine is not to be measured; None if nothing speaks against it."""
    for name in REQUIRED:
        if not tests.get(name, Outcome()).green:
            return f"tests of {name} are not green"
    return None
