from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import cpu
from tests.kernels.support import DEVICE


@pytest.fixture(params=["torch", "cpu"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test on the torch implementation and, where it has been built, on that in C++."""
    if request.param == "torch":

        def no_operations(tensor: Tensor) -> Any | None:
            return None

        monkeypatch.setattr(cpu, "operations", no_operations)
    elif cpu.operations(torch.zeros((), device=DEVICE)) is None:
        pytest.skip("there are no CPU kernels: python -m kernels.cpu builds them")
    return str(request.param)
