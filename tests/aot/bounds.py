"""Limits that every compiled kernel must meet."""

from collections.abc import Sequence

import pytest

from tests.aot import resources
from tests.aot.compiler import GPUS, Compiled

each_gpu = pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "sm_100"])
# For choices that depend on shared memory: also GPUs with less of it.
every_gpu = pytest.mark.parametrize("gpu", list(GPUS))


def check(kernels: Sequence[Compiled], *, stack: int = 0) -> None:
    """Assert that something was compiled, fits its GPU, and does not spill registers."""
    assert kernels, "nothing was launched"
    for kernel in kernels:
        assert kernel.stack <= stack, kernel
        assert kernel.shared <= GPUS[kernel.gpu].shared_memory, kernel
        resources.collected.append(kernel)
