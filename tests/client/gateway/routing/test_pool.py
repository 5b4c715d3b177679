"""A pool of scripted servers over real sockets."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from client import (
    ConfigurationError,
    InvalidRequestError,
    QueueFullError,
    RequestTimeoutError,
    UnavailableError,
)
from client.gateway.routing.balance import Balance
from client.gateway.routing.pool import ServerPool
from tests.client.fake_triton import Answer, FakeTriton, Piece
from tests.client.gateway.routing.told import told, until

GONE = "in ensemble 'ensemble', the engine process has died; the request is lost [code=unavailable]"
FULL = "in ensemble 'ensemble', Maximum queue size of 3 requests reached [code=queue_full]"
SLOW = [Piece({0: "a"}), Piece({0: "b"}, finished=(0,), final=True, delay_s=0.3)]


def _run(
    urls: list[str], body: Callable[[ServerPool], Coroutine[Any, Any, Any]], **options: Any
) -> Any:
    async def main() -> Any:
        async with ServerPool(urls, chance=random.Random(1), **options) as pool:
            return await body(pool)

    return asyncio.run(main())


async def _text(pool: ServerPool, prompt: str = "a", **options: Any) -> str:
    async with aclosing(pool.stream(prompt, **options)) as chunks:
        return "".join([chunk.text async for chunk in chunks])


def _counts(servers: tuple[FakeTriton, FakeTriton]) -> list[int]:
    return [len(server.requests) for server in servers]


class TestRetry:
    @pytest.mark.parametrize("message", [GONE, FULL], ids=["gone", "full"])
    def test_another_server_takes_what_one_cannot(
        self, servers: tuple[FakeTriton, FakeTriton], message: str
    ) -> None:
        broken, well = servers
        broken.pieces, broken.error_message = [], message

        async def body(pool: ServerPool) -> list[str]:
            return [await _text(pool, request_id=f"id-{i}") for i in range(8)]

        assert _run([broken.url, well.url], body) == ["Hello world"] * 8
        assert len(well.requests) == 8
        assert {call.request_id for call in well.calls if call.request_id} == {
            f"id-{i}" for i in range(8)
        }

    def test_only_before_the_first_piece(self, servers: tuple[FakeTriton, FakeTriton]) -> None:
        for server in servers:
            server.pieces, server.error_message = [Piece({0: "once"})], GONE

        async def body(pool: ServerPool) -> list[str]:
            chunks = pool.stream("a")
            texts = [(await anext(chunks)).text]
            with pytest.raises(UnavailableError, match="died"):
                await anext(chunks)
            return texts

        assert _run([server.url for server in servers], body) == ["once"]
        assert sum(_counts(servers)) == 1

    def test_each_server_is_asked_once(self, servers: tuple[FakeTriton, FakeTriton]) -> None:
        for server in servers:
            server.pieces, server.error_message = [], FULL

        async def body(pool: ServerPool) -> None:
            with pytest.raises(QueueFullError, match="Maximum queue size of 3"):
                await _text(pool)

        _run([server.url for server in servers], body)
        assert _counts(servers) == [1, 1]

    def test_a_full_server_says_more_than_a_lost_one(
        self, servers: tuple[FakeTriton, FakeTriton]
    ) -> None:
        full, lost = servers
        full.pieces, full.error_message = [], FULL
        lost.pieces, lost.error_message = [], GONE

        async def body(pool: ServerPool) -> None:
            for _ in range(8):  # in either order
                with pytest.raises(QueueFullError):
                    await _text(pool)

        _run([full.url, lost.url], body)
        assert len(full.requests) == 8
        assert len(lost.requests) > 1

    def test_what_is_wrong_is_wrong_everywhere(
        self, servers: tuple[FakeTriton, FakeTriton]
    ) -> None:
        for server in servers:
            server.pieces, server.error_message = [], "n: no [code=invalid_value]"

        async def body(pool: ServerPool) -> None:
            with pytest.raises(InvalidRequestError, match="n: no"):
                await _text(pool)

        _run([server.url for server in servers], body)
        assert sum(_counts(servers)) == 1

    def test_all_attempts_share_the_timeout(self, servers: tuple[FakeTriton, FakeTriton]) -> None:
        first, second = servers
        late = Answer([Piece(None, delay_s=0.4)], error_message=GONE)
        first.first, second.first = [late], [late]
        started = time.monotonic()

        async def body(pool: ServerPool) -> None:
            with pytest.raises(RequestTimeoutError):
                await _text(pool, timeout=0.6)

        _run([first.url, second.url], body)
        assert time.monotonic() - started < 2


class TestBreaker:
    def test_a_lost_server_gets_no_requests(self, servers: tuple[FakeTriton, FakeTriton]) -> None:
        lost, well = servers
        lost.pieces, lost.error_message = [], GONE
        lost.health = '{"state": "dead", "detail": "the engine process has died"}'

        async def body(pool: ServerPool) -> None:
            await until(pool, lost, up=0)
            before = len(lost.requests)
            for _ in range(5):
                await _text(pool)
            assert len(lost.requests) == before == 0

        _run([lost.url, well.url], body)
        assert len(well.requests) == 5

    def test_it_is_found_again(self, servers: tuple[FakeTriton, FakeTriton]) -> None:
        lost, well = servers
        lost.health = '{"state": "starting"}'

        async def body(pool: ServerPool) -> None:
            await until(pool, lost, up=0)
            lost.health = servers[1].health
            async with asyncio.timeout(60):
                while not lost.requests:
                    await _text(pool)
                    await asyncio.sleep(0.1)

        _run([lost.url, well.url], body)

    def test_if_all_are_lost_they_are_tried_all_the_same(
        self, servers: tuple[FakeTriton, FakeTriton]
    ) -> None:
        for server in servers:
            server.health = '{"state": "dead"}'
            server.first = [Answer(error_message=GONE)]

        async def body(pool: ServerPool) -> None:
            for server in servers:
                await until(pool, server, up=0)
            with pytest.raises(UnavailableError, match="the engine process has died"):
                await _text(pool)
            assert _counts(servers) == [1, 1]
            assert await _text(pool) == "Hello world"

        _run([server.url for server in servers], body)


class TestChoice:
    def test_a_prompt_goes_where_its_beginning_went(
        self, servers: tuple[FakeTriton, FakeTriton]
    ) -> None:
        async def body(pool: ServerPool) -> None:
            for turn in range(1, 11):
                await _text(pool, "a long conversation " * 50 * turn)

        _run([server.url for server in servers], body)
        assert sorted(_counts(servers)) == [0, 10]

    def test_salts_share_nothing(self, servers: tuple[FakeTriton, FakeTriton]) -> None:
        async def body(pool: ServerPool) -> None:
            for salt in range(20):
                await _text(pool, "a" * 1000, cache_salt=str(salt))

        _run([server.url for server in servers], body)
        assert min(_counts(servers)) > 0

    def test_a_cached_prefix_does_not_overload_its_server(
        self, servers: tuple[FakeTriton, FakeTriton]
    ) -> None:
        for server in servers:
            server.pieces = SLOW

        async def body(pool: ServerPool) -> None:
            await asyncio.gather(*(_text(pool, "a" * 1000) for _ in range(12)))

        balance = Balance(balance_abs_threshold=2)
        _run([server.url for server in servers], body, balance=balance)
        assert min(_counts(servers)) >= 4

    def test_requests_of_others_count(self, servers: tuple[FakeTriton, FakeTriton]) -> None:
        busy, idle = servers
        busy.health = '{"state": "ready", "num_in_flight": 50}'

        async def body(pool: ServerPool) -> None:
            await until(pool, busy, requests=50)
            for i in range(5):
                await _text(pool, str(i))

        _run([busy.url, idle.url], body)
        assert _counts(servers) == [0, 5]


class TestLeaving:
    def test_leaving_a_stream_ends_the_request(
        self, servers: tuple[FakeTriton, FakeTriton]
    ) -> None:
        for server in servers:
            server.pieces = [Piece({0: "a"}), Piece({0: "b"}, final=True, delay_s=30)]

        async def body(pool: ServerPool) -> None:
            async with aclosing(pool.stream("a", request_id="mine")) as chunks:
                async for _ in chunks:
                    break

        _run([server.url for server in servers], body)
        assert servers[0].stopped | servers[1].stopped == {"mine"}


def test_metrics_tell_of_each_server(servers: tuple[FakeTriton, FakeTriton]) -> None:
    lost, busy = servers
    lost.health = '{"state": "dead"}'
    busy.health = '{"state": "ready", "num_in_flight": 4}'

    async def body(pool: ServerPool) -> None:
        await until(pool, lost, up=0, requests=0)
        await until(pool, busy, up=1, requests=4)
        assert set(told(pool, lost)) == {"up", "requests"}

    _run([lost.url, busy.url], body)


def test_errors_do_not_tell_where_the_servers_are() -> None:
    async def body(pool: ServerPool) -> None:
        with pytest.raises(UnavailableError, match="no server answers") as caught:
            await _text(pool)
        assert "localhost" not in str(caught.value)

    _run(["localhost:1"], body)


@pytest.mark.parametrize("urls", [[], ["a:1", "a:1"], ["a"]])
def test_addresses_are_checked(urls: list[str]) -> None:
    with pytest.raises(ConfigurationError):
        ServerPool(urls)
