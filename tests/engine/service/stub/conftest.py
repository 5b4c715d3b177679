"""An engine client for one test."""

from collections.abc import Iterator

import pytest

from engine.service.stub.engine_client import EngineClient
from tests.engine.service.stub.clients import start


@pytest.fixture
def client() -> Iterator[EngineClient]:
    client = start()
    yield client
    client.close()
