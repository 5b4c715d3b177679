"""Wall time of a call on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def repeated_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the wall times of `repeats` calls, after one warm-up call."""
    call()
    return [seconds(call) for _ in range(repeats)]
