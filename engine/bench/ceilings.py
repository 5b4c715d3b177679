"""Measured limits of this machine, from which floors are computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from engine.bench.cpu_ceilings import product_dtype
from engine.bench.stopwatch import repeated_seconds
from kernels.bench import timing

_COPY_BYTES = 64 * 2**20  # on a CPU: larger than most caches
_PRODUCT = 512
_REPEATS = 5


def measure(device: torch.device) -> dict[str, float | None]:
    """Return copy bandwidth and the rate of bf16 products, as in `kernels.bench.timing`."""
    if device.type == "cuda":
        return timing.ceilings(timing.Stopwatch())
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    a, b = (torch.randn(_PRODUCT, _PRODUCT).to(product_dtype()) for _ in range(2))
    return {
        "copy_gb_s": 2 * _COPY_BYTES / _seconds(partial(target.copy_, source)) / 1e9,
        "bf16_tflop_s": 2 * _PRODUCT**3 / _seconds(partial(torch.mm, a, b)) / 1e12,
    }


def _seconds(call: Callable[[], object]) -> float:
    return median(repeated_seconds(call, _REPEATS))
