"""Runs the kernel tests on a GPU or in Triton's interpreter, and skips them elsewhere.

    TRITON_INTERPRET=1 pytest tests/kernels     # without a GPU
    pytest tests/kernels                        # on a GPU

They need only torch, triton, numpy and pytest.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels import device
from tests.kernels.support import poison, take_path

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


@pytest.fixture(params=["triton", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on the kernel and on the implementation for CPUs."""
    take_path(request.param, monkeypatch)
    return request.param


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the number of SMs: the interpreter runs all programs in turn."""
    if device.INTERPRETED:
        limits = replace(device.HOPPER, num_sms=2)
        monkeypatch.setattr(device, "limits", lambda where: limits)


@pytest.fixture(scope="session", autouse=True)
def _language_replaced_once() -> Iterator[None]:
    """Save much of the time that the interpreter takes.

    It replaces `triton.language` by what runs in Python at each launch, for each function that the
    kernel calls once more, and restores it after the launch.
    """
    if not device.INTERPRETED:
        yield
        return
    replace_language = interpreter._patch_lang
    scope = replace_language(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())
        yield
    scope.restore()


@pytest.fixture(scope="session", autouse=True)
def _no_discarded_checks() -> Iterator[None]:
    """Save a sixth of the interpreter's time: checks for overflow, of which it drops the result."""
    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture(scope="session", autouse=True)
def _products_without_order() -> Iterator[None]:
    """Sum products in float64, rounded once.

    On some CPUs NumPy's sums in float32 depend on the place of a row among the others; those of a
    GPU do not.
    """
    dot = InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, accumulator: Any, *others: Any) -> Any:
        wide = TensorHandle(accumulator.data.astype(np.float64), tl.float64)
        total = dot(builder, a, b, wide, *others).data
        return TensorHandle(total.astype(accumulator.data.dtype), accumulator.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield
