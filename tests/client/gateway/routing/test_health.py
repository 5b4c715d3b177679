"""The health of a pool: of those that are well, and soon."""

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from client import UnavailableError
from client.gateway.routing.pool import ServerPool
from tests.client.fake_triton import FakeTriton
from tests.client.gateway.routing.told import until


def run(urls: list[str], body: Callable[[ServerPool], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        async with ServerPool(urls) as pool:
            return await body(pool)

    return asyncio.run(main())


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("localhost", 0)) as server:
        yield f"localhost:{server.getsockname()[1]}"


def test_one_that_is_ready_is_enough(servers: tuple[FakeTriton, FakeTriton]) -> None:
    servers[0].health = '{"state": "dead", "detail": "x", "num_in_flight": 1}'
    servers[1].health = '{"state": "ready", "num_in_flight": 2}'

    async def body(pool: ServerPool) -> Any:
        return await pool.health()

    health = run([server.url for server in servers], body)
    assert health.is_ready
    assert health.num_in_flight == 3


def test_a_silent_server_keeps_nobody_waiting(
    servers: tuple[FakeTriton, FakeTriton], silent: str
) -> None:
    async def body(pool: ServerPool) -> tuple[Any, float]:
        started = time.monotonic()
        health = await pool.health()
        return health, time.monotonic() - started

    health, seconds = run([silent, servers[0].url], body)
    assert health.is_ready
    assert seconds < 2


def test_a_lost_server_is_not_asked(servers: tuple[FakeTriton, FakeTriton]) -> None:
    lost, well = servers
    lost.health = '{"state": "dead", "num_in_flight": 1}'

    async def body(pool: ServerPool) -> Any:
        await until(pool, lost, up=0)
        return await pool.health()

    assert run([lost.url, well.url], body).num_in_flight == 0


def test_none_answers() -> None:
    async def body(pool: ServerPool) -> Any:
        with pytest.raises(UnavailableError):
            await pool.health()

    run(["localhost:1"], body)
