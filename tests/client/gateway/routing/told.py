"""What a pool has been told of its servers."""

import asyncio

from client.gateway.routing.pool import ServerPool
from tests.client.fake_triton import FakeTriton


def told(pool: ServerPool, server: FakeTriton) -> dict[str, float]:
    """Return the metrics of a server."""
    return {
        metric.name.removeprefix("trident:gateway_server_"): sample.value
        for metric in pool.collect()
        for sample in metric.samples
        if sample.labels["server"] == server.url
    }


async def until(pool: ServerPool, server: FakeTriton, **values: float) -> None:
    """Wait until a check of the server's health has told the pool as much."""
    async with asyncio.timeout(60):
        while not values.items() <= told(pool, server).items():
            await asyncio.sleep(0.01)
