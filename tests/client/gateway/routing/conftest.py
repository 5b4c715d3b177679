from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.client.fake_triton import HELLO, FakeTriton, serve

IDLE = '{"state": "ready", "num_in_flight": 0}'


@contextmanager
def _server() -> Iterator[FakeTriton]:
    servicer = FakeTriton(pieces=HELLO, health=IDLE)
    server, servicer.url = serve(servicer)
    try:
        yield servicer
    finally:
        server.stop(grace=None).wait()


@pytest.fixture
def servers() -> Iterator[tuple[FakeTriton, FakeTriton]]:
    with _server() as first, _server() as second:
        yield first, second
