"""What a call takes on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def repeated_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the wall times of `repeats` calls; one before them is not counted."""
    call()
    return [seconds(call) for _ in range(repeats)]
