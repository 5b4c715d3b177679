"""Two real servers: where prompts go, and what becomes of requests when one of them is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI

from client import AsyncTridentClient, TridentClient
from client.gateway.routing.pool import ServerPool
from client.gateway.settings import GatewaySettings
from engine.launch.server import TritonServer
from tests.server.gateway.running import running

pytestmark = pytest.mark.server

NUM_GROUPS, NUM_QUESTIONS = 13, 8
PREFIX_CHARACTERS = 400
MAX_TOKENS = 400  # a quarter of a second and more


@pytest.fixture(scope="module")
def servers(server: TritonServer, checkpoint: Path) -> Iterator[list[TritonServer]]:
    """That of most tests, and another one, to be killed, with as large a cache."""
    settings: dict[str, Any] = {"model": str(checkpoint), "dtype": "float32"}
    settings["num_gpu_blocks_override"] = server.config.num_gpu_blocks_override
    with TritonServer(settings, ports=0, start_timeout_s=120) as another:
        yield [server, another]


def _trace() -> list[str]:
    """Return questions on long texts, in random order: more than one cache can hold."""
    chance = random.Random(5)
    words = [f"word{i}" for i in range(200)]
    texts = [" ".join(chance.choices(words, k=200))[:PREFIX_CHARACTERS] for _ in range(NUM_GROUPS)]
    trace = [f"{text} {i}?" for text in texts for i in range(NUM_QUESTIONS)]
    chance.shuffle(trace)
    return trace


async def _hit_rate(ask: Callable[[str, dict[str, Any]], Any], salt: str) -> float:
    """Return the share of prompt tokens that were cached, of all questions, one after the other.

    Of two at a time, the load would decide where a text goes that nobody knows, and chance with it.
    """
    cached, total = 0, 0
    for question in _trace():
        async with aclosing(ask(question, {"max_tokens": 2, "cache_salt": salt})) as chunks:
            async for chunk in chunks:
                cached += chunk.num_cached_tokens
            total += chunk.num_input_tokens
    return cached / total


def test_prompts_go_to_the_server_that_has_their_beginning(servers: list[TritonServer]) -> None:
    urls = [server.grpc_url for server in servers]

    async def main() -> tuple[float, float]:
        clients = [AsyncTridentClient(url) for url in urls]
        turn = count()

        def round_robin(prompt: str, options: dict[str, Any]) -> Any:
            return clients[next(turn) % 2].stream(prompt, **options)

        blind = await _hit_rate(round_robin, "round robin")
        for client in clients:
            await client.close()
        async with ServerPool(urls, chance=random.Random(1)) as pool:
            aware = await _hit_rate(lambda prompt, options: pool.stream(prompt, **options), "aware")
        return blind, aware

    blind, aware = asyncio.run(main())
    print(f"hit rate: round robin {blind:.2f}, prefix-aware {aware:.2f}")
    assert aware > blind + 0.2


def test_killing_one_does_not_disturb_the_other(servers: list[TritonServer]) -> None:
    urls = tuple(server.grpc_url for server in servers)
    prompts = [f"story {i}" for i in range(16)]

    with TridentClient(urls[0]) as client, ThreadPoolExecutor() as threads:
        options: Any = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        answers = threads.map(lambda each: client.generate(each, **options), prompts)
        expected = [answer.text for answer in answers]

    async def main(address: str) -> None:
        async with AsyncOpenAI(
            base_url=f"http://{address}/v1", api_key="none", max_retries=0
        ) as openai:
            got = [""] * len(prompts)
            begun = [asyncio.Event() for _ in prompts]
            errors: list[APIError] = []

            async def follow(number: int) -> None:
                try:
                    stream = await _ask(openai, prompts[number])
                    async for chunk in stream:
                        got[number] += chunk.choices[0].text
                        begun[number].set()
                except APIError as error:
                    errors.append(error)
                    assert expected[number].startswith(got[number])
                else:
                    assert got[number] == expected[number]

            streams: list[asyncio.Task[None]] = []
            async with asyncio.timeout(120), AsyncTridentClient(urls[1]) as direct:
                # One that has begun is with the server that is killed, and others have not begun.
                while not (await direct.health()).num_in_flight:
                    streams.append(asyncio.create_task(follow(len(streams))))
                    await begun[len(streams) - 1].wait()
            # Or the answer would end while the others are sent, which takes a busy machine as long.
            os.kill(servers[1].pid, signal.SIGSTOP)
            rest = range(len(streams), len(prompts))
            streams += [asyncio.create_task(follow(number)) for number in rest]
            await asyncio.sleep(0.01)
            os.kill(servers[1].pid, signal.SIGKILL)
            # From the first moment on no new request hears of it.
            later = [asyncio.create_task(_text(openai, each)) for each in prompts[:8]]
            assert await asyncio.gather(*later) == expected[:8]
            await asyncio.gather(*streams)
            # Only those that it was answering, after their first piece.
            assert 0 < len(errors) < len(prompts)
            assert {str(error.code) for error in errors} == {"unavailable"}
            assert not any(urls[1] in str(error) for error in errors)

    with running(GatewaySettings(triton_urls=urls)) as address:
        asyncio.run(main(address))


async def _ask(openai: AsyncOpenAI, prompt: str) -> Any:
    return await openai.completions.create(
        model="ensemble",
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )


async def _text(openai: AsyncOpenAI, prompt: str) -> str:
    return "".join([chunk.choices[0].text async for chunk in await _ask(openai, prompt)])
