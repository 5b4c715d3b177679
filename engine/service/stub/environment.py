"""The environment variables of a process that runs the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def engine_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` with our packages on PYTHONPATH."""
    package_root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [package_root, base.get("PYTHONPATH")]))
    return {**base, "PYTHONPATH": path}
