"""The environment variables of a process that runs the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def engine_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` with what the engine wants; what `base` itself says of it counts."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_root, base.get("PYTHONPATH")]))
    # Spinning OpenMP threads would take the cores from the server beside us.
    return {"OMP_WAIT_POLICY": "PASSIVE", **base, "PYTHONPATH": path}
