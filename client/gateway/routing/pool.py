"""ServerPool: several Triton servers, called like one `AsyncTridentClient`."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from client.aio import AsyncTridentClient
from client.errors import (
    ConfigurationError,
    QueueFullError,
    RequestCancelledError,
    TridentClientError,
    UnavailableError,
)
from client.gateway.routing.balance import Balance, Candidate
from client.gateway.routing.prefixes import block_hashes, prompt_bytes
from client.gateway.routing.server import Server
from client.protocol import Chunk, Health, Prompt, RequestOptions, TokenizeOptions, Tokens
from client.session import only
from client.timeouts import Timeout, limits

T = TypeVar("T")

CHECK_INTERVAL_S = 1.0
LATE_S = 0.2  # how long servers that are slow to report their health are waited for


class ServerPool(Collector):
    """Sends each request to one of several servers, and to the next if that one cannot take it.

        async with ServerPool(["a:8001", "b:8001"]) as pool:
            async for chunk in pool.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="")

    A request is tried once on each server at most, without pauses, and only until the first piece
    of its answer has come. Inside of the block each server is asked for its health once a second,
    which is also how one that was lost is found again.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        balance: Balance | None = None,
        connect: Callable[..., AsyncTridentClient] = AsyncTridentClient,
        chance: random.Random | None = None,
        **options: Any,
    ) -> None:
        """Set everything up.

        Args:
            urls: of the servers' gRPC services.
            connect: makes the client of a server.
            options: of `AsyncTridentClient`, for all of them: `model`, `ssl`, `headers`.

        Raises:
            ConfigurationError: there is no address, or one is twice there or wrong.
        """
        if not urls or len(set(urls)) < len(urls):
            raise ConfigurationError(
                "must be one or several addresses, all different", param="triton_url"
            )
        # A proxy is for what lies outside of the network that a gateway and its servers share.
        own: dict[str, Any] = {"retry": None, "proxy": False, **options}
        self._servers = [Server(url, connect(url, **own)) for url in urls]
        self._balance = balance or Balance()
        self._chance = chance or random.Random()
        self._checks: list[asyncio.Task[None]] = []
        self._is_closed = False

    def stream(
        self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the answer piece by piece; as `AsyncTridentClient.stream`."""
        content = prompt_bytes(prompt, options.get("messages"), options.get("chat_parameters"))
        blocks = block_hashes(content, options.get("cache_salt", ""))
        total, read = limits(options.get("timeout"), Timeout())
        deadline = time.monotonic() + total

        def ask(client: AsyncTridentClient) -> AsyncGenerator[Chunk, None]:
            options["timeout"] = _limits(deadline, read)
            return client.stream(prompt, **options)

        return self._answers(blocks, ask)

    async def tokenize(self, text: str | None = None, **options: Unpack[TokenizeOptions]) -> Tokens:
        """Return the tokens of a text or of messages; as `AsyncTridentClient.tokenize`."""
        return await self._answer(lambda client: client.tokenize(text, **options))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens; as `AsyncTridentClient.detokenize`."""
        return await self._answer(lambda client: client.detokenize(token_ids))

    async def health(self, timeout: float | None = 5.0) -> Health:
        """Return the state of those that are well: ready if one is, and the sum of the figures.

        When one is ready, the others have no more than a moment left to answer.

        Raises:
            TridentClientError: none of them answers.
        """
        asked = [asyncio.create_task(each.health(timeout)) for each in self._well()]
        try:
            for answer in asyncio.as_completed(asked):
                with suppress(TridentClientError):
                    if (await answer).is_ready:
                        await asyncio.wait(asked, timeout=LATE_S)
                        break
        finally:
            for each in asked:
                each.cancel()
            answers = await asyncio.gather(*asked, return_exceptions=True)
        found = [each for each in answers if isinstance(each, Health)]
        if not found:
            raise next(each for each in answers if isinstance(each, BaseException))
        first = next((each for each in found if each.is_ready), found[0])
        return replace(
            first,
            num_restarts=sum(each.num_restarts for each in found),
            num_in_flight=sum(each.num_in_flight for each in found),
        )

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the servers."""
        up = GaugeMetricFamily(
            "trident:gateway_server_up", "Whether requests go to the server.", labels=["server"]
        )
        load = GaugeMetricFamily(
            "trident:gateway_server_requests",
            "Requests that the server has, as far as the gateway knows.",
            labels=["server"],
        )
        for server in self._servers:
            up.add_metric([server.url], server.is_well)
            load.add_metric([server.url], server.load)
        yield from (up, load)

    async def close(self) -> None:
        """End what is running by an `UnavailableError` and close the connections. Repeatable."""
        self._is_closed = True
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        await asyncio.gather(*(each.client.close() for each in self._servers))

    async def __aenter__(self) -> Self:
        self._checks = [asyncio.create_task(_keep_checking(each)) for each in self._servers]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _answer(self, ask: Callable[[AsyncTridentClient], Awaitable[T]]) -> T:
        async def one(client: AsyncTridentClient) -> AsyncGenerator[T, None]:
            yield await ask(client)

        return only([answer async for answer in self._answers((), one)])

    async def _answers(
        self,
        blocks: Sequence[int],
        ask: Callable[[AsyncTridentClient], AsyncGenerator[T, None]],
    ) -> AsyncGenerator[T, None]:
        """Yield what a server answers to a prompt with these blocks, or the next if it cannot."""
        left = self._well()
        full: QueueFullError | None = None
        while True:
            server = self._choose(left, blocks)
            left.remove(server)
            has_begun = False
            try:
                with server.request():
                    async with aclosing(ask(server.client)) as answers:
                        async for answer in answers:
                            if not has_begun:
                                has_begun = True
                                server.succeeded()
                            yield answer
                return
            except RequestCancelledError:
                if not self._is_closed:
                    raise
                raise UnavailableError("the gateway is shutting down") from None
            except UnavailableError as error:
                if has_begun:
                    raise
                full = error if isinstance(error, QueueFullError) else full
                if not left:
                    # One that is full will have room: more useful to know than a lost connection.
                    raise (full or error) from None

    def _well(self) -> list[Server]:
        """Return the servers that are well; all if none is, as checks may be wrong."""
        return [each for each in self._servers if each.is_well] or list(self._servers)

    def _choose(self, servers: Sequence[Server], blocks: Sequence[int]) -> Server:
        """Return the server for a prompt, and remember that it got it."""
        candidates = [
            Candidate(each.load, each.tree.match(blocks), len(each.tree)) for each in servers
        ]
        server = servers[self._balance.choose(candidates, len(blocks), self._chance)]
        server.tree.add(blocks)
        return server


async def _keep_checking(server: Server) -> None:
    while True:
        await server.check()
        await asyncio.sleep(CHECK_INTERVAL_S)


def _limits(deadline: float, read: float) -> Timeout:
    """Return the limits of an attempt: what is left until `deadline`, and `read` seconds."""
    left = max(deadline - time.monotonic(), 1e-3)
    return Timeout(
        total=None if left == math.inf else left, read=None if read == math.inf else read
    )
