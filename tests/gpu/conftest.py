"""The engine's tests on a GPU, which `make test-all` runs on the CPU where there is none.

    pytest tests/gpu

There they prove less: no kernel, no CUDA graph, and no step ahead unless a test asks for it. But
what will run on a GPU has then run before.
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
    """Where the engine runs."""
    # The models are tiny: threads would spend their time waiting for each other.
    torch.set_num_threads(1)
    return torch.device(request.param)
