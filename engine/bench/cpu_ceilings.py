"""Measured limits of this machine's CPU.

`python -m engine.bench.cpu_ceilings` prints them as JSON, for programs that do not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from engine.bench.stopwatch import repeated_seconds
from engine.layers.int8_linear import Int8Product
from engine.layers.packed_linear import can_pack

_READ_BYTES = 256 * 2**20  # larger than all caches
_PRODUCT = 2048
_REPEATS = 7


def measure() -> dict[str, float]:
    """Return read bandwidth in bytes/s and the rate of matrix products in operations/s.

    Measured with as many threads as torch uses.
    """
    numbers = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    read = _READ_BYTES / _fastest(numbers.sum)
    a, b = (torch.randn(_PRODUCT, _PRODUCT).to(product_dtype()) for _ in range(2))
    flops = 2 * _PRODUCT**3
    bf16 = flops / _fastest(lambda: torch.mm(a, b))
    weight = torch.randint(-127, 128, (_PRODUCT, _PRODUCT), dtype=torch.int8)
    product = Int8Product(weight, torch.ones(_PRODUCT))
    x = torch.randint(0, 256, (_PRODUCT, _PRODUCT), dtype=torch.uint8)
    int8 = flops / _fastest(lambda: product(x, torch.float32))
    return {"read": read, "bf16": bf16, "int8": int8}


def product_dtype() -> torch.dtype:
    """Return the dtype of bfloat16 products: float32 if the CPU has no instructions for them."""
    return torch.bfloat16 if can_pack(torch.bfloat16) else torch.float32


def _fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some calls, as a ceiling is what can be reached."""
    return min(repeated_seconds(call, _REPEATS))


if __name__ == "__main__":
    print(json.dumps(measure()))
