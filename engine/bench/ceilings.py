"""The time of a call, on a CPU and on a GPU; measured limits of this machine, for floors."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils.benchmark import Measurement, Timer

from engine.layers.linear.int8 import Int8Gemm
from engine.layers.linear.onednn import can_pack

_BYTES = 256 * 2**20  # larger than all caches
_MEASURED_S, _FEWEST = 0.1, 10  # calls on a GPU: for so long, and at least so many
_SIZE, _GPU_SIZE = 2048, 8192  # of the matrices


def timed(call: Callable[[], object], least_s: float = 0.2) -> Measurement:
    """Return the wall times of calls on a CPU, with all of torch's threads, for `least_s`."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=least_s)


def gpu_seconds(call: Callable[[], Any], *, graph: bool = True) -> float:
    """Return the median time of `call` on a GPU, each with a cold L2 cache; it has been called.

    What the cache holds is unmodified, like the weights and keys that a step has read before: lines
    that were written must be written back first, in the time of the call.

    Args:
        graph: replay it as a CUDA graph, like the engine's decode steps, which excludes the time
            that the host takes to launch it.
    """
    if not graph:
        return _cold_seconds(call)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        call()
    try:
        return _cold_seconds(captured.replay)
    finally:
        captured.reset()


def _cold_seconds(call: Callable[[], Any]) -> float:
    others = torch.zeros(_BYTES // 4, dtype=torch.int32, device="cuda")
    seconds: list[float] = []
    end = time.monotonic() + _MEASURED_S
    while len(seconds) < _FEWEST or time.monotonic() < end:
        event: Any = partial(torch.cuda.Event, enable_timing=True)
        pairs = [(event(), event()) for _ in range(_FEWEST)]
        for before, after in pairs:
            others.amax()
            before.record()
            call()
            after.record()
        torch.cuda.synchronize()
        seconds += [1e-3 * before.elapsed_time(after) for before, after in pairs]
    return median(seconds)


def measure(device: torch.device | None = None) -> dict[str, float]:
    """Return the bytes per second that are read, and the operations per second of products.

    The fastest of several calls on a CPU, with as many threads as torch uses: `read`, `bf16` and
    `int8`. On a GPU `read` is the bandwidth of a copy, which counts both directions; with `bf16`,
    `fp8` where torch supports it, and `launch`: the seconds of a graph with a trivial kernel.
    """
    return _gpu(device) if device is not None and device.type == "cuda" else _cpu()


def _cpu() -> dict[str, float]:
    numbers = torch.ones(_BYTES // 8, dtype=torch.int64)
    # In float32 if the CPU has no instructions for bfloat16.
    dtype = torch.bfloat16 if can_pack(torch.bfloat16) else torch.float32
    a, b = (torch.randn(_SIZE, _SIZE).to(dtype) for _ in range(2))
    weight = torch.randint(-127, 128, (_SIZE, _SIZE), dtype=torch.int8)
    gemm = Int8Gemm(weight, torch.ones(_SIZE))
    x = torch.randint(0, 256, (_SIZE, _SIZE), dtype=torch.uint8)
    flops = 2 * _SIZE**3
    return {
        "read": _BYTES / _fastest(numbers.sum),
        "bf16": flops / _fastest(partial(torch.mm, a, b)),
        "int8": flops / _fastest(partial(gemm, x, torch.float32)),
    }


def _fastest(call: Callable[[], object]) -> float:
    return min(timed(call).times)


def _gpu(device: torch.device) -> dict[str, float]:
    source = torch.randn(2**30, device=device)  # 4 GiB
    target = torch.empty_like(source)
    # By a kernel: in a graph, a copy is one of the slower copy engines.
    copy = partial(torch.neg, source, out=target)
    found = {"read": 2 * 4 * source.numel() / _warm(copy)}
    del source, target
    a, b = (torch.randn(_GPU_SIZE, _GPU_SIZE, device=device).bfloat16() for _ in range(2))
    flops, one = 2 * _GPU_SIZE**3, torch.ones((), device=device)
    found["bf16"] = flops / _warm(partial(torch.mm, a, b))
    found["launch"] = _warm(partial(one.add_, 1))
    narrow = (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t())
    scales: dict[str, Any] = {"scale_a": one, "scale_b": one, "use_fast_accum": True}
    with suppress(RuntimeError):  # not on this GPU
        found["fp8"] = flops / _warm(
            partial(torch._scaled_mm, *narrow, out_dtype=torch.bfloat16, **scales)
        )
    return found


def _warm(call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    return gpu_seconds(call)
