"""The engine's tests on a GPU, and whether its figures are meaningful."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kernels.bench.testing import ROOT, Outcome, Suite

FOLDER = ROOT / "tests" / "gpu"
REQUIRED = ("parity", "modes")  # failures in these files invalidate figures
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")  # named in the ids of their tests
_SHARDS = {"parity": 6, "modes": 4}  # processes per file, mostly compiling; others have 2
_TINY = ("cancel",)  # takes seconds on a CPU


def suites(*, tiny: bool = False) -> list[Suite]:
    """Return a suite per file of tests/gpu, those of `REQUIRED` first: test_x.py is `gpu x`."""
    files = {file.stem.removeprefix("test_"): file for file in sorted(FOLDER.glob("test_*.py"))}
    names = _TINY if tiny else [*REQUIRED, *(name for name in files if name not in REQUIRED)]
    many = (os.cpu_count() or 1) >= 8
    return [
        Suite(f"gpu {name}", FOLDER, (files[name],), _SHARDS.get(name, 2) if many else 1)
        for name in names
    ]


def refusal(tests: Mapping[str, Outcome], family: str) -> str | None:
    """Return why models of `family` must not be measured; None if they may be.

    A failed test that names other families in its id says nothing about this one.
    """
    for name in REQUIRED:
        found = tests.get(f"gpu {name}")
        if found is None:
            continue
        if not found.passed:
            return f"tests of {name}: none passed"
        for test, _ in found.failures:
            named = {each for each in FAMILIES if each in test}
            if not named or family in named:
                return f"tests of {name}: {test} failed"
    return None
