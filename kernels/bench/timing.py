"""Time on the GPU, and the ceilings that the figures of the same run are held against."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch

from kernels.bench.case import Call, randn

# Four times the L2 of an H200 (60 MB). Reading it takes about 75 us, in which the host gets ahead.
_FLUSH_BYTES = 256 * 2**20
_BUDGET_MS = 60.0
_REPEATS = (10, 150)


class Stopwatch:
    """Times calls by CUDA events: the median over replays of a graph, with a cold L2.

    The replays of a graph leave out what the host takes to launch, as in a decode step of the
    engine. The cache is emptied by reading: written lines would have to be stored during the call.
    """

    def __init__(self) -> None:
        self._lines = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def micros(self, call: Call) -> float:
        """Return the microseconds that `call` takes; it has been called before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        estimate = median(self._replay(graph, 3))
        repeats = int(_BUDGET_MS / (estimate + 0.1))
        times = self._replay(graph, min(max(repeats, _REPEATS[0]), _REPEATS[1]))
        graph.reset()
        return 1000 * median(times)

    def _replay(self, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
        """Return the milliseconds of `count` replays."""
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for start, end in zip(starts, ends, strict=True):
            self._lines.amax()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def ceilings(watch: Stopwatch) -> dict[str, float | None]:
    """Return what this GPU reaches now.

    copy_gb_s counts bytes read and written; the TFLOP/s are those of torch's products of 8192^3
    random numbers; launch_us is the time of a graph that adds up one number, which is in every
    figure.
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
    """Return the TFLOP/s of the same product in e4m3; None where torch cannot."""
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
