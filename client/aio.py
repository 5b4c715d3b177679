"""AsyncTridentClient: `TridentClient` for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, Unpack

from client.aio_transport import AsyncTransport
from client.connection import CONNECT_TIMEOUT_S, SSLOptions, connection
from client.errors import InvalidRequestError, TridentClientError
from client.protocol import (
    Chunk,
    Completion,
    Health,
    Prompt,
    RequestOptions,
    TokenizeOptions,
    Tokens,
)
from client.request import ENSEMBLE
from client.response import Collector
from client.retry import DEFAULT_RETRY, RetryPolicy
from client.session import Session, only
from client.timeouts import Timeout


class AsyncTridentClient:
    """Talks to one server from one event loop at a time; any number of requests at once.

        async with AsyncTridentClient("localhost:8001") as client:
            async for chunk in client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="")

    The arguments are those of `TridentClient`. It may be made outside of a running loop.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        model: str = ENSEMBLE,
        ssl: bool | SSLOptions = False,
        headers: Mapping[str, str] = {},
        timeout: float | Timeout | None = None,
        connect_timeout: float = CONNECT_TIMEOUT_S,
        retry: RetryPolicy | None = DEFAULT_RETRY,
        proxy: bool = True,
    ) -> None:
        to = connection(url, ssl, headers, connect_timeout, proxy=proxy)
        self._session = Session(to, Timeout.of(timeout), retry, model)
        self._transport = AsyncTransport(self._session)

    async def generate(
        self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """Complete a prompt or answer messages; as `TridentClient.generate`.

        Cancelling the task cancels the request on the server.
        """
        collector = Collector()
        stream = self.stream(prompt, **options)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                collector.add(chunk)
        return collector.completion()

    def stream(
        self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the answer piece by piece; as `TridentClient.stream`.

        Leaving the loop early cancels the request as soon as the event loop runs again; inside
        `contextlib.aclosing` it has been cancelled when the block ends.
        """
        return self._transport.run(self._session.completion(prompt, **options))

    async def cancel(self, request_id: str, timeout: float | None = 5.0) -> None:
        """End the requests of that id; as `TridentClient.cancel`."""
        async for _ in self._transport.run(self._session.stop(request_id, timeout)):
            pass

    async def tokenize(self, text: str | None = None, **options: Unpack[TokenizeOptions]) -> Tokens:
        """Return the tokens of a text or of messages; as `TridentClient.tokenize`."""
        asked = self._session.tokenize(text, **options)
        return only([answer async for answer in self._transport.run(asked)])

    async def detokenize(self, token_ids: Sequence[int], timeout: float | None = None) -> str:
        """Return the text of tokens; as `TridentClient.detokenize`."""
        asked = self._session.detokenize(token_ids, timeout)
        return only([answer async for answer in self._transport.run(asked)])

    async def health(self, timeout: float | None = 5.0) -> Health:
        """Return the state of the engine; as `TridentClient.health`."""
        exchange = self._session.health(timeout)
        try:
            return only([answer async for answer in self._transport.run(exchange)])
        except InvalidRequestError:  # a server without health requests
            asked = self._session.ready_request()
            return self._session.health_of(await self._transport.ask("ModelReady", asked, exchange))

    async def is_ready(self, timeout: float | None = 5.0) -> bool:
        """Return whether the server answers and its engine takes requests."""
        try:
            return (await self.health(timeout)).is_ready
        except TridentClientError:
            return False

    async def close(self) -> None:
        """Cancel what is running and close the connection."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
