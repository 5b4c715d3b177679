"""Times calls on the GPU, and measures the ceilings that figures are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from kernels.bench.case import Call, randn

# Four times the L2 cache of an H200 (60 MB).
_FLUSH_BYTES = 256 * 2**20
_FLUSH_US = 60.0  # best case for reading them, at the data sheet's 4.8 TB/s
_BUDGET_MS = 60.0
_REPEATS = (10, 150)


class Stopwatch:
    """Times calls with CUDA events: the median over many, each with a cold L2 cache.

    Calls are captured in a CUDA graph and replayed, like the engine's decode steps, which excludes
    launch overhead of the host. For a call that cannot be captured, the GPU is kept busy until the
    host has launched it. The cache is flushed by reading, which serves both purposes: after writes,
    dirty lines would have to be written back during the call.
    """

    def __init__(self) -> None:
        self._lines = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def micros(self, call: Call, *, graph: bool = True) -> float:
        """Return the microseconds that `call` takes on the GPU; it must have been called before."""
        if not graph:
            start = time.perf_counter()
            call()
            host_us = 1e6 * (time.perf_counter() - start)
            return self._median(call, 1 + int(2 * host_us / _FLUSH_US))
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            call()
        try:
            return self._median(captured.replay, 1)
        finally:
            captured.reset()

    def _median(self, call: Callable[[], Any], flushes: int) -> float:
        estimate = median(self._times(call, 3, flushes))
        repeats = int(_BUDGET_MS / (estimate + flushes * _FLUSH_US / 1000))
        least, most = _REPEATS
        return 1000 * median(self._times(call, min(max(repeats, least), most), flushes))

    def _times(self, call: Callable[[], Any], count: int, flushes: int) -> list[float]:
        """Return the milliseconds of `count` calls, each after `flushes` L2 flushes."""
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for start, end in zip(starts, ends, strict=True):
            for _ in range(flushes):
                self._lines.amax()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def ceilings(watch: Stopwatch) -> dict[str, float | None]:
    """Return this GPU's measured ceilings.

    copy_gb_s counts bytes read and written; the TFLOP/s are those of torch's products of 8192^3
    random numbers; launch_us is the time of a graph with a trivial kernel, an overhead included in
    every figure.
    """
    device = torch.device("cuda")
    source = randn(2 * 2**30, dtype=torch.bfloat16, device=device)  # 4 GiB
    target = torch.empty_like(source)
    copy = 2 * source.numel() * 2 / _warm(watch, partial(target.copy_, source)) / 1e3
    del source, target
    a, b = (randn(8192, 8192, dtype=torch.bfloat16, device=device, seed=seed) for seed in (0, 1))
    bf16 = 2 * 8192**3 / _warm(watch, partial(torch.mm, a, b)) / 1e6
    one = torch.zeros(1, device=device)
    return {
        "copy_gb_s": copy,
        "bf16_tflop_s": bf16,
        "fp8_tflop_s": _fp8(watch, a, b),
        "launch_us": _warm(watch, partial(one.add_, one)),
    }


def _fp8(watch: Stopwatch, a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Return the TFLOP/s of the same product in e4m3; None if torch does not support it."""
    one = torch.ones((), device=a.device)
    fp8 = torch.float8_e4m3fn
    call: Call = partial(
        torch._scaled_mm,
        a.to(fp8),
        b.to(fp8).t(),
        scale_a=one,
        scale_b=one,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    try:
        return 2 * 8192**3 / _warm(watch, call) / 1e6
    except RuntimeError:
        return None


def _warm(watch: Stopwatch, call: partial[Any]) -> float:
    for _ in range(3):
        call()
    return watch.micros(call)
