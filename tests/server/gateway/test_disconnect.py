"""A client that goes ends its request in the engine, whatever state that is in."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from client import TridentClient
from engine.launch.server import TritonServer
from tests.server.scraping import Change, assert_idle, scrape
from tests.waiting import eventually

pytestmark = pytest.mark.server

LONG = {"max_tokens": 450, "ignore_eos": True, "n": 6}
NUM_OTHERS = 20  # more of these than there is room for
RESPONSE = {"input": "a", "max_output_tokens": 450, "ignore_eos": True}
USER = {"role": "user", "content": "a"}
MANY = {"type": "array", "items": {"type": "boolean"}, "minItems": 450}
LONG_MESSAGE = {"model": "alias", "max_tokens": 450, "messages": [USER]} | {
    "output_config": {"format": {"type": "json_schema", "schema": MANY}}
}


def request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += "content-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def leave(address: str, message: bytes, delay: float) -> None:
    """Send a request, and close the connection after `delay` seconds."""
    host, _, port = address.partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(message)
    await writer.drain()
    await asyncio.sleep(delay)
    writer.transport.abort()


@pytest.fixture(scope="module")
def direct(server: TritonServer) -> Iterator[TridentClient]:
    with TridentClient(server.grpc_url) as client:
        yield client


def in_flight(direct: TridentClient) -> int:
    return direct.health().num_in_flight


def until(direct: TridentClient, number: int, limit_s: float) -> None:
    """Wait for so many requests in flight."""
    started = time.monotonic()
    while (seen := in_flight(direct)) != number:
        assert time.monotonic() - started < limit_s, f"{seen} requests in flight"


def is_cut_short(change: Change, limit_s: float = 60.0) -> bool:
    """Wait for a sequence that has ended before its last token."""
    return eventually(lambda: change.now()["request_success_total abort"] > 0, limit_s)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**LONG, "prompt": "a"}),
        ("/v1/completions", {**LONG, "prompt": ["a", "b", "c"]}),
        ("/v1/chat/completions", {**LONG, "messages": [USER]}),
        ("/v1/responses", RESPONSE),
        ("/v1/messages", LONG_MESSAGE),
    ],
)
def test_the_engine_hears_of_it(
    gateway: str,
    server: TritonServer,
    direct: TridentClient,
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    number = len(body.get("prompt", "a"))

    async def episode() -> None:
        host, _, port = gateway.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        answer = asyncio.create_task(reader.read())
        try:
            writer.write(request(path, {**body, "stream": stream}))
            while await asyncio.to_thread(in_flight, direct) != number and not answer.done():
                pass
        finally:
            writer.transport.abort()
            await asyncio.gather(answer, return_exceptions=True)
        await asyncio.to_thread(until, direct, 0, 60)

    change, deadline = Change(server), time.monotonic() + 60
    while time.monotonic() < deadline:
        asyncio.run(episode())
        if is_cut_short(change, 2):
            return
    pytest.fail("each time the answer went to its end")


@pytest.mark.parametrize("stream", [False, True])
def test_also_of_a_request_that_waits(
    gateway: str, server: TritonServer, direct: TridentClient, stream: bool
) -> None:
    host, _, port = gateway.partition(":")

    async def begin() -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection(host, int(port))
        body = {**LONG, "prompt": "a", "stream": stream}
        writer.write(request("/v1/completions", body))
        return writer

    async def episode() -> None:
        others = [await begin() for _ in range(NUM_OTHERS)]
        await asyncio.to_thread(until, direct, NUM_OTHERS, 60)
        last = await begin()
        await asyncio.to_thread(until, direct, NUM_OTHERS + 1, 60)
        assert await asyncio.to_thread(
            eventually, lambda: scrape(server)["num_requests_waiting"] > 1
        )
        change = Change(server)
        last.transport.abort()
        await asyncio.to_thread(until, direct, NUM_OTHERS, 60)
        assert await asyncio.to_thread(is_cut_short, change)
        for writer in others:
            writer.transport.abort()
        await asyncio.to_thread(until, direct, 0, 60)

    asyncio.run(episode())


def test_200_random_disconnects_leave_nothing(
    gateway: str, server: TritonServer, direct: TridentClient
) -> None:
    chance = random.Random(5)

    def message() -> bytes:
        body = {**LONG, "stream": chance.random() < 0.5, "max_tokens": chance.randint(1, 400)}
        if chance.random() < 0.5:
            body |= {"prompt": ["x" * chance.randint(1, 300)] * chance.randint(1, 3)}
            return request("/v1/completions", body)
        text = "x" * chance.randint(1, 300)
        return request(
            "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
        )

    async def storm() -> None:
        # More at once than there is room for: some wait, some are refused.
        limit = asyncio.Semaphore(50)

        async def one() -> None:
            async with limit:
                await leave(gateway, message(), chance.random() ** 3)

        await asyncio.gather(*(one() for _ in range(200)))

    asyncio.run(storm())
    until(direct, 0, 60)
    assert_idle(server)
