from collections.abc import Iterator

import pytest

from tests.client.clients import BOTH, Connect
from tests.client.fake_triton import FakeTriton, serve


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    """A scripted server; its address is `triton.url`."""
    servicer = FakeTriton()
    server, servicer.url = serve(servicer)
    yield servicer
    server.stop(grace=None).wait()


@pytest.fixture(params=BOTH, ids=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Connect:
    """Makes clients: a test runs with either kind."""
    return request.param
