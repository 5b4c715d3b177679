"""The engine's tests on a GPU, run on the CPU by `make test-all` if there is none.

    pytest tests/gpu

On the CPU they use no kernels and no CUDA graphs, and run a step ahead only if a test asks for it;
but they check that the tests themselves work.
"""

import pytest
import torch

_HAS_CUDA = torch.cuda.is_available()
_CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not _HAS_CUDA, reason="needs a CUDA device")]
)


_CPU = pytest.param("cpu", marks=pytest.mark.large)


@pytest.fixture(scope="session", params=[_CUDA] if _HAS_CUDA else [_CPU, _CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of the engine."""
    # The models are tiny: more threads would mostly wait for each other.
    torch.set_num_threads(1)
    return torch.device(request.param)
