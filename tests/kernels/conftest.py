"""Runs the kernel tests on a GPU or in Triton's interpreter, and skips them elsewhere.

    TRITON_INTERPRET=1 pytest tests/kernels     # without a GPU
    pytest tests/kernels                        # on a GPU

They need only torch, triton, numpy and pytest.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import device
from tests.kernels.support import poison

RUNS = device.INTERPRETED or torch.cuda.is_available()
_ALLOCATORS = ("empty", "empty_like")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if RUNS else True


def pytest_report_header() -> str | None:
    return None if RUNS else "tests/kernels: left out, TRITON_INTERPRET=1 pytest tests/kernels"


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN or a large number, so that unwritten results are noticed."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: poison(allocate(*args, **kwargs))

    for name in _ALLOCATORS:
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the number of SMs: the interpreter runs all programs in turn."""
    if device.INTERPRETED:
        limits = replace(device.HOPPER, num_sms=2)
        monkeypatch.setattr(device, "limits", lambda where: limits)
