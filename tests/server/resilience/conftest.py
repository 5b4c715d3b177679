"""A server for the short versions: few sequences, so that requests have to wait."""

from collections.abc import Iterator

import pytest

from engine.launch.server import TritonServer
from tests.server.release import released_all
from tests.server.resilience.service import serving


@pytest.fixture(scope="package")
def resilient() -> Iterator[TritonServer]:
    with serving(max_num_seqs=8, num_gpu_blocks_override=2400) as server:
        yield server
    assert released_all(server)
