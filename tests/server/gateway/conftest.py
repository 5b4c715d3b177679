"""One gateway in front of the server that most tests share, and OpenAI's own clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from client.gateway.settings import GatewaySettings
from engine.launch.server import TritonServer
from tests.server.gateway.running import running

MODEL = "random/model"


@pytest.fixture(scope="session")
def gateway(server: TritonServer) -> Iterator[str]:
    """`host:port`."""
    settings = GatewaySettings(
        triton_urls=(server.grpc_url,),
        model_names=(MODEL, "alias"),
        metrics_url=server.metrics_url,
    )
    with running(settings) as address:
        yield address


@pytest.fixture(scope="session")
def openai(gateway: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{gateway}/v1", api_key="none", max_retries=0) as client:
        yield client


class Blocking:
    """An AsyncOpenAI, called like an OpenAI."""

    def __init__(self, base_url: str) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)

    def create(self, route: str, **arguments: Any) -> Any:
        async def call() -> Any:
            made = self._client
            for name in route.split("."):
                made = getattr(made, name)
            answer = await made.create(**arguments)  # type: ignore[attr-defined]
            return [each async for each in answer] if arguments.get("stream") else answer

        return self._runner.run(call())

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


class Direct:
    """An OpenAI, with the same interface."""

    def __init__(self, base_url: str) -> None:
        self._client = OpenAI(base_url=base_url, api_key="none", max_retries=0)

    def create(self, route: str, **arguments: Any) -> Any:
        made: Any = self._client
        for name in route.split("."):
            made = getattr(made, name)
        answer = made.create(**arguments)
        return list(answer) if arguments.get("stream") else answer

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="session", params=[Direct, Blocking], ids=["sync", "async"])
def client(request: pytest.FixtureRequest, gateway: str) -> Iterator[Direct | Blocking]:
    """Either of OpenAI's clients; a stream comes as a list."""
    made = request.param(f"http://{gateway}/v1")
    yield made
    made.close()
