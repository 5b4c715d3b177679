"""The environment variables of a process that runs the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# OpenMP's threads wait for the next operation of a layer awake, which is there within some 10 us,
# and then sleep: the server needs the cores. With ten times the count, two threads of the bundled
# model used twice the processor time per token at 64 sequences, and were slower on busy cores.
_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


def engine_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` with the engine's variables added; those set in `base` take precedence."""
    package_root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [package_root, base.get("PYTHONPATH")]))
    return {**_THREADS, **base, "PYTHONPATH": path}
