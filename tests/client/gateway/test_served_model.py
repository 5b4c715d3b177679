"""What is known of the model: asked for once, and never waited for again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from client.errors import UnavailableError
from client.gateway import gateway
from client.gateway.errors import ApiError
from client.gateway.gateway import ServedModel
from client.protocol import Health

READY = Health("ready", tool_call_parser="hermes")


class Pool:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.answers = asyncio.Queue[Health | Exception]()

    async def health(self) -> Health:
        self.num_asked += 1
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


def run(body: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            pool: Any = Pool()
            await body(pool, ServedModel(pool))

    asyncio.run(main())


def test_who_asks_at_once_shares_the_answer() -> None:
    async def body(pool: Pool, model: ServedModel) -> None:
        first, *others = [asyncio.create_task(model.facts()) for _ in range(3)]
        await asyncio.sleep(0)
        first.cancel()  # its client has gone; the others wait on
        await asyncio.sleep(0)
        pool.answers.put_nowait(READY)
        assert await asyncio.gather(*others) == [READY, READY]
        assert pool.num_asked == 1

    run(body)


def test_what_is_old_serves_until_there_is_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_KNOWN_S", 0.0)

    async def body(pool: Pool, model: ServedModel) -> None:
        pool.answers.put_nowait(READY)
        assert await model.facts() == READY
        assert await model.facts() == READY  # and asks
        pool.answers.put_nowait(UnavailableError("gone"))
        await asyncio.sleep(0.01)
        assert await model.facts() == READY  # and asks again
        pool.answers.put_nowait(Health("ready"))
        await asyncio.sleep(0.01)
        assert await model.facts() == Health("ready")

    run(body)


def test_what_was_never_known_is_an_error() -> None:
    async def body(pool: Pool, model: ServedModel) -> None:
        pool.answers.put_nowait(UnavailableError("gone"))
        with pytest.raises(ApiError, match="gone"):
            await model.facts()
        pool.answers.put_nowait(READY)
        assert await model.facts() == READY

    run(body)
