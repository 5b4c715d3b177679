"""The time of a call, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.benchmark import Measurement, Timer


def timed(call: Callable[[], object], least_s: float = 0.2) -> Measurement:
    """Return the wall times of calls on a CPU, with all of torch's threads, for `least_s`."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=least_s)


def gpu_seconds(call: Callable[[], Any], *, graph: bool = True) -> float:
    """Return the median time of `call` on a GPU, each with a cold L2 cache; it has been called.

    Args:
        graph: replay it as a CUDA graph, like the engine's decode steps, which excludes the time
            that the host takes to launch it.
    """
    from triton.testing import do_bench

    if not graph:
        return 1e-3 * float(do_bench(call, return_mode="median"))
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        call()
    try:
        return 1e-3 * float(do_bench(captured.replay, return_mode="median"))
    finally:
        captured.reset()
