from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels import cpu, device
from tests.kernels.support import DEVICE

# Tests that take the interpreter minutes; test_state_kernels.py holds the same on fewer tokens.
_LONG = ("test_delta_rule", "test_state_properties")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            is_triton = item.callspec.params.get("path") == "triton"
            if is_triton and item.path.stem in _LONG:
                item.add_marker(pytest.mark.large)


@pytest.fixture(params=["triton", "torch", "cpu"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test on the kernels, on the torch implementation and, if built, on that in C++."""
    monkeypatch.setattr(device, "runs_triton", lambda tensor: request.param == "triton")
    if request.param == "torch":

        def no_operations(tensor: Tensor) -> Any | None:
            return None

        monkeypatch.setattr(cpu, "operations", no_operations)
    elif request.param == "cpu" and cpu.operations(torch.zeros((), device=DEVICE)) is None:
        pytest.skip("there are no CPU kernels: python -m kernels.cpu builds them")
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def _bfloat16() -> Iterator[None]:
    """Let the interpreter round to bfloat16 and multiply it, as a GPU does.

    By itself it cuts digits off, and multiplies the bits as integers. Sums and other operations
    of bfloat16 stay wrong; kernels here have none.
    """
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(builder: Any, source: Any, dtype: Any) -> Any:
        if dtype.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        return cast(builder, source, dtype)

    def create_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        wide = [
            builder.cast_impl(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each
            for each in (a, b)
        ]
        return dot(builder, *wide, *others)

    if not device.INTERPRETED:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield
