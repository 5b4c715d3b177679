"""Many streams at once through the gateway are what each of them is alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from client import TridentClient
from engine.launch.server import TritonServer
from tests.server.gateway.conftest import MODEL

pytestmark = pytest.mark.server

NUM_STREAMS = 64


def asked(number: int) -> dict[str, Any]:
    return {"temperature": 0.8, "seed": number, "max_tokens": 10 + number % 30}


def messages(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Question {number}: what then?"}]


def test_64_streams_equal_their_solo_runs(gateway: str, server: TritonServer) -> None:
    async def stream(client: AsyncOpenAI, number: int) -> tuple[str, int, str]:
        text, reason, tokens = "", "", 0
        created: Any = client.chat.completions.create
        async for chunk in await created(
            model=MODEL,
            messages=messages(number),
            stream=True,
            stream_options={"include_usage": True},
            **asked(number),
        ):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
        return text, tokens, reason

    async def all_streams() -> list[tuple[str, int, str]]:
        async with AsyncOpenAI(base_url=f"http://{gateway}/v1", api_key="none") as client:
            return await asyncio.gather(*(stream(client, i) for i in range(NUM_STREAMS)))

    streamed = asyncio.run(all_streams())
    with TridentClient(server.grpc_url) as direct:
        for number, found in enumerate(streamed):
            solo: Any = direct.generate(messages=messages(number), **asked(number))
            assert found == (solo.text, solo.num_output_tokens, solo.finish_reason)
