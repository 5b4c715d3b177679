"""Number of threads of the model's operations on a CPU: as many as make a step faster, no more."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

# Where a container's share of the cores is: cgroup v2, then v1.
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_CFS_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_CFS_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")

_REPEATS = 5
# A step that takes so long has enough work for all cores. What else starts at the same time, such
# as the other stages, would disturb the choice.
_LONG_S = 0.02
_GAIN = 0.95  # more threads must take less than this of the time: others need the cores too


def most_threads() -> int:
    """Return the most threads that torch's operations may have.

    At most torch's own number, from OMP_NUM_THREADS or the process's cores, and at most the cores
    of the container's CPU quota: more threads would be throttled while others wait for them.
    """
    return max(1, min(torch.get_num_threads(), _quota()))


def choose_num_threads(most: int, run_step: Callable[[], None]) -> int:
    """Return the number of threads, up to `most`, with which `run_step` is fastest.

    torch has another number of threads afterwards.
    """
    torch.set_num_threads(most)
    run_step()  # warm-up
    if _seconds(run_step) > _LONG_S:
        return most
    best, best_s = 1, math.inf
    for num_threads in sorted({*(2**i for i in range(most.bit_length())), most}):
        torch.set_num_threads(num_threads)
        run_step()  # starts the threads
        step_s = min(_seconds(run_step) for _ in range(_REPEATS))
        if step_s < _GAIN * best_s:
            best, best_s = num_threads, step_s
    return best


def _seconds(run_step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run_step()
    return time.perf_counter() - begin


def _quota() -> int:
    """Return the cores that the container may use at a time; a large number without a limit."""
    try:
        if _CPU_MAX.exists():
            quota, period = _CPU_MAX.read_text().split()
        else:
            quota, period = _CFS_QUOTA.read_text(), _CFS_PERIOD.read_text()
        return math.ceil(int(quota) / int(period)) if int(quota) > 0 else 2**31
    except (OSError, ValueError):  # no container, or "max": no limit
        return 2**31
