"""Servers for the short versions of the drills."""

import pytest

from engine.launch.server import TritonServer
from tests.server.conftest import Share
from tests.server.resilience.kill_engine import SETTINGS
from tests.server.resilience.service import serving


@pytest.fixture(scope="session")
def killable(share: Share, request: pytest.FixtureRequest) -> TritonServer:
    """One whose engine process is killed; its queue is short."""
    return share(request, serving(**SETTINGS, max_num_seqs=64, max_num_queued_reqs=4))
