"""AsyncTridentClient: `TridentClient` for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client.connection import SSLOptions, connection
from client.errors import InvalidRequestError, TridentClientError
from client.exchange import Exchange
from client.protocol import Chunk, Completion, Health, Message, SamplingOptions
from client.response import Collector
from client.retry import DEFAULT_RETRY, RetryPolicy
from client.session import WITHDRAWAL_TIMEOUT_S, Session, only

T = TypeVar("T")


class AsyncTridentClient:
    """Talks to one server from one event loop; any number of requests at once.

        async with AsyncTridentClient("localhost:8001") as client:
            async for chunk in client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="")

    The arguments are those of `TridentClient`.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        ssl: bool | SSLOptions = False,
        headers: Mapping[str, str] = {},
        retry: RetryPolicy | None = DEFAULT_RETRY,
    ) -> None:
        to = connection(url, ssl, headers)
        self._session = Session(to, retry)
        self._channel = (
            grpc.aio.insecure_channel(url, to.options)
            if to.credentials is None
            else grpc.aio.secure_channel(url, to.credentials, to.options)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._closed = asyncio.Event()

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        stream: bool = False,
        timeout: float | None = None,
        request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Complete a prompt or answer messages; as `TridentClient.generate`.

        Cancelling the task cancels the request on the server.
        """
        collector = Collector(streamed=stream)
        exchange = self._session.completion(
            prompt, messages, sampling, stream=stream, timeout=timeout, request_id=request_id
        )
        async with aclosing(self._run(exchange)) as chunks:
            async for chunk in chunks:
                collector.add(chunk)
        return collector.completion()

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout: float | None = None,
        request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the answer piece by piece; as `TridentClient.stream`.

        Leaving the loop early cancels the request as soon as the event loop runs again; inside
        `contextlib.aclosing` it has been cancelled when the block ends.
        """
        return self._run(
            self._session.completion(
                prompt, messages, sampling, stream=True, timeout=timeout, request_id=request_id
            )
        )

    async def cancel(self, request_id: str, timeout: float | None = 5.0) -> None:
        """End the requests of that id; as `TridentClient.cancel`."""
        async for _ in self._run(self._session.stop(request_id, timeout)):
            pass

    async def health(self, timeout: float | None = 5.0) -> Health:
        """Return how the engine is; as `TridentClient.health`."""
        exchange = self._session.health(timeout)
        try:
            return only([answer async for answer in self._run(exchange)])
        except InvalidRequestError:  # it knows no such question
            ready = await self._ask(self._stub.ModelReady, self._session.ready_request(), exchange)
            return self._session.health_of(ready)

    async def is_ready(self, timeout: float | None = 5.0) -> bool:
        """Tell whether the server answers and its engine takes requests."""
        try:
            return (await self.health(timeout)).is_ready
        except TridentClientError:
            return False

    async def close(self) -> None:
        """Cancel what is running and close the connection."""
        self._closed.set()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, exchange: Exchange[T]) -> AsyncGenerator[T, None]:
        """Do the I/O of `exchange`: see there."""
        exchange.start()
        while True:
            call, answered = None, asyncio.Event()
            try:
                message = exchange.message(batched=await self._takes_batches(exchange))
                # One stream per request: an error on a shared one would not say whose it is.
                call = self._stub.ModelStreamInfer(
                    _held_open(message, answered), **self._options(exchange)
                )
                async for reply in call:
                    for answer in exchange.read(reply):
                        yield answer
                    if exchange.complete:
                        return
                raise exchange.unfinished()
            except (grpc.RpcError, TridentClientError) as error:
                delay = exchange.delay_before_retry(error)
            except GeneratorExit:
                if call is not None:
                    await self._withdraw(exchange, call)
                raise
            except (grpc.aio.UsageError, asyncio.CancelledError):
                # gRPC raises them for a call that ended under it, by close() or by a deadline that
                # struck while the request was being written.
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    if call is not None:
                        await self._withdraw(exchange, call)
                    raise
                raise exchange.ended_here() from None
            finally:
                if call is not None:
                    await _end(call, answered, exchange.complete)
            await self._pause(delay, exchange)

    async def _withdraw(self, exchange: Exchange[Any], call: Any) -> None:
        """Nobody wants the answer any more: have the server end it, if that is soon done."""
        withdrawal = self._session.withdraw(exchange)
        if withdrawal is None or self._closed.is_set():
            return
        with suppress(grpc.RpcError, grpc.aio.UsageError, TridentClientError, TimeoutError):
            async with asyncio.timeout(WITHDRAWAL_TIMEOUT_S):
                async for _ in self._run(withdrawal):
                    pass
                async for reply in call:
                    exchange.read(reply)
                    if exchange.complete:
                        break

    async def _pause(self, seconds: float, exchange: Exchange[Any]) -> None:
        try:
            await asyncio.wait_for(self._closed.wait(), seconds)
        except TimeoutError:
            return
        raise exchange.ended_here()

    async def _takes_batches(self, exchange: Exchange[Any]) -> bool:
        if self._session.batched is not None:
            return self._session.batched
        config = await self._ask(self._stub.ModelConfig, self._session.config_request(), exchange)
        return self._session.learn(config)

    async def _ask(self, method: Callable[..., Any], message: Any, exchange: Exchange[Any]) -> Any:
        try:
            return await method(message, **self._options(exchange))
        except grpc.RpcError as error:
            raise exchange.error(error) from None

    def _options(self, exchange: Exchange[Any]) -> dict[str, Any]:
        headers = self._session.connection.headers
        return {"timeout": exchange.time_left(), "metadata": headers}


async def _held_open(
    message: service_pb2.ModelInferRequest, answered: asyncio.Event
) -> AsyncIterator[service_pb2.ModelInferRequest]:
    """Yield the request, and end only when it has been answered: see `client.client`."""
    yield message
    await answered.wait()


async def _end(call: Any, answered: asyncio.Event, complete: bool) -> None:
    """Cancel what is not complete; let the server end what is, for a late cancel disturbs it."""
    if not complete:
        call.cancel()
    answered.set()  # releases the task that sends the requests
    if complete:
        with suppress(grpc.RpcError):
            async for _ in call:
                pass
