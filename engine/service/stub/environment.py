"""The environment variables of a process that runs the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def engine_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` with our packages on PYTHONPATH, and the working directory on no path.

    A path that is a part of PYTHONPATH stays, but an empty one is the working directory.
    """
    package_root = str(Path(__file__).resolve().parents[3])
    others = base.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([package_root, *filter(None, others)])
    return {**base, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
