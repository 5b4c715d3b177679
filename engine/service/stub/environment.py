"""The environment variables of a process that runs the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# OpenMP's threads spin for some 0.1 ms after an operation: to wake them for the next one would make
# a step of small operations a fifth longer. Between steps they sleep: the server needs the cores.
_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


def engine_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` with the engine's variables added; those set in `base` take precedence."""
    package_root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [package_root, base.get("PYTHONPATH")]))
    return {**_THREADS, **base, "PYTHONPATH": path}
