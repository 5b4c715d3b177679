"""A gateway in front of a scripted server."""

from collections.abc import Iterator

import pytest

from tests.client.fake_triton import HELLO, FakeTriton, serve


@pytest.fixture(scope="module")
def triton() -> Iterator[FakeTriton]:
    """A scripted server for a whole module; it says hello."""
    servicer = FakeTriton(pieces=HELLO)
    server, servicer.url = serve(servicer)
    yield servicer
    server.stop(grace=None).wait()
