"""Date, GPU and versions of a benchmark run."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime

import torch
import triton


def machine() -> dict[str, str | None]:
    """Return date, GPU and versions; without a GPU, `gpu` is None."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.split("\n")[0].strip()
