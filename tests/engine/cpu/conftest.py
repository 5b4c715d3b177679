"""Tests of the kernels in C++: they need a compiler, or what it has built."""

from typing import Any

import pytest
import torch

from kernels import cpu


@pytest.fixture
def fast() -> Any:
    """The operators of the library that this machine would serve with."""
    operations = cpu.operations(torch.zeros(()))
    if operations is None:
        pytest.skip("there are no CPU kernels: python -m kernels.cpu builds them")
    return operations
