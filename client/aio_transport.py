"""AsyncTransport: the I/O of `AsyncTridentClient`."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client.connection import Connection
from client.errors import (
    ConfigurationError,
    RequestCancelledError,
    RequestTimeoutError,
    TridentClientError,
    UnavailableError,
)
from client.exchange import Exchange
from client.session import WITHDRAWAL_TIMEOUT_S, Session

T = TypeVar("T")

LARGE_BYTES = 2**17  # of a response: it takes milliseconds to be read


class AsyncTransport:
    """As `Transport`, in one event loop at a time.

    The channel is made by the first request in a loop, and once more in the next loop when that
    one has been closed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: _Open | None = None
        self._is_closed = False

    async def run(self, exchange: Exchange[T]) -> AsyncGenerator[T, None]:
        """Yield the answer to `exchange`, over as many attempts as it allows.

        Raises:
            TridentClientError: the last attempt failed.
        """
        exchange.start()
        try:
            while True:
                try:
                    await self._withdraw_before_retry(exchange)
                    async with aclosing(self._attempt(exchange)) as answers:
                        async for answer in answers:
                            yield answer
                    return
                except TridentClientError as error:
                    delay = exchange.delay_before_retry(error)
                    if delay is None:
                        raise
                await self._pause(delay, exchange)
        except BaseException:
            await self._withdraw(exchange)
            raise

    async def ask(self, method: str, message: Any, exchange: Exchange[Any]) -> Any:
        """Make a call that has one answer, within the time of `exchange`.

        Raises:
            TridentClientError: it failed.
        """
        try:
            return await getattr(self._opened().stub, method)(message, **self._options(exchange))
        except grpc.RpcError as error:
            raise exchange.error(error) from None
        except (grpc.aio.UsageError, asyncio.CancelledError):
            if _is_cancelled():
                raise
            raise exchange.ended_here() from None

    async def close(self) -> None:
        """Cancel what is running and close the connection."""
        self._is_closed = True
        if self._open is not None and self._open.loop is asyncio.get_running_loop():
            self._open.closed.set()
            await self._open.channel.close()

    async def _attempt(self, exchange: Exchange[T]) -> AsyncGenerator[T, None]:
        call, answered = None, asyncio.Event()
        try:
            message = exchange.message(batched=await self._takes_batches(exchange))
            # One stream per request: an error on a shared one would not name its request.
            call = self._opened().stub.ModelStreamInfer(
                _held_open(message, answered), **self._options(exchange)
            )
            replies = aiter(call)
            while not exchange.complete:
                if (reply := await _next(replies, exchange)) is None:
                    raise exchange.unfinished()
                for answer in await self._read(reply, exchange):
                    yield answer
        except GeneratorExit:
            if await self._withdraw(exchange) and call is not None:
                await _drain(call, exchange)
            raise
        except (grpc.RpcError, TridentClientError) as error:
            raise exchange.failed(error) from None
        except (grpc.aio.UsageError, asyncio.CancelledError):
            # gRPC raises them for a call that ended under it, by close() or by a deadline that
            # struck while the request was being written.
            if _is_cancelled():
                raise
            raise exchange.failed(exchange.ended_here()) from None
        finally:
            if call is not None:
                await _end(call, answered, exchange.complete)

    async def _read(
        self, reply: service_pb2.ModelStreamInferResponse, exchange: Exchange[T]
    ) -> list[T]:
        """Return what a response holds.

        The event loop does not stand still for a large one, of which one is read at a time.

        Raises:
            TridentClientError: it is an error.
        """
        exchange.note(reply)
        if reply.ByteSize() < LARGE_BYTES:
            return exchange.take_apart(reply)
        async with self._opened().reading:
            return await asyncio.to_thread(exchange.take_apart, reply)

    async def _withdraw_before_retry(self, exchange: Exchange[Any]) -> None:
        """Ask the server to end an earlier attempt that may still be running.

        Raises:
            UnavailableError: it does not answer.
        """
        if (withdrawal := self._session.withdrawal(exchange)) is None:
            return
        try:
            async for _ in self.run(withdrawal):
                pass
        except RequestTimeoutError:
            raise exchange.still_away() from None
        except UnavailableError:
            raise
        except TridentClientError:
            pass  # a server that does not end requests by their id
        exchange.may_be_running = False

    async def _withdraw(self, exchange: Exchange[Any]) -> bool:
        """Ask the server to end a request; return whether it did in time."""
        withdrawal = self._session.withdrawal(exchange)
        if withdrawal is None or self._is_closed:
            return False
        exchange.may_be_running = False
        with suppress(TridentClientError):
            async for _ in self.run(withdrawal):
                pass
            return True
        return False

    async def _pause(self, seconds: float, exchange: Exchange[Any]) -> None:
        try:
            await asyncio.wait_for(self._opened().closed.wait(), seconds)
        except TimeoutError:
            return
        raise exchange.ended_here()

    async def _takes_batches(self, exchange: Exchange[Any]) -> bool:
        if self._session.batched is not None:
            return self._session.batched
        config = await self.ask("ModelConfig", self._session.config_request(), exchange)
        return self._session.learn(config)

    def _options(self, exchange: Exchange[Any]) -> dict[str, Any]:
        headers = self._session.connection.headers
        return {"timeout": exchange.time_left(), "metadata": headers}

    def _opened(self) -> _Open:
        """Return the channel of the running loop."""
        if self._is_closed:
            raise RequestCancelledError("the client is closed")
        loop = asyncio.get_running_loop()
        if self._open is None or self._open.loop.is_closed():
            self._open = _Open(_channel(self._session.connection), loop)
        if self._open.process != os.getpid():
            raise ConfigurationError(
                "make a new client in this process",
                param="the client was used before this process was forked",
            )
        if self._open.loop is not loop:
            raise ConfigurationError(
                "make a client for each event loop",
                param="the client is in use by another event loop",
            )
        return self._open


class _Open:
    """A channel with its stub, and where it was made: in which loop, in which process."""

    def __init__(self, channel: grpc.aio.Channel, loop: asyncio.AbstractEventLoop) -> None:
        self.channel = channel
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.closed = asyncio.Event()
        self.reading = asyncio.Lock()  # a large response
        self.loop = loop
        self.process = os.getpid()


def _channel(to: Connection) -> grpc.aio.Channel:
    if to.credentials is None:
        return grpc.aio.insecure_channel(to.url, to.options)
    return grpc.aio.secure_channel(to.url, to.credentials, to.options)


def _is_cancelled() -> bool:
    """Whether the running task is being cancelled, and not only a gRPC call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _held_open(
    message: service_pb2.ModelInferRequest, answered: asyncio.Event
) -> AsyncIterator[service_pb2.ModelInferRequest]:
    """Yield the request, and end only when it has been answered: see `client.transport`."""
    yield message
    await answered.wait()


async def _next(replies: AsyncIterator[T], exchange: Exchange[Any]) -> T | None:
    """Return the next response, or None at the end.

    Raises:
        ReadTimeoutError: it did not come in time.
    """
    if exchange.read_timeout == math.inf:
        return await anext(replies, None)
    try:
        async with asyncio.timeout(exchange.read_timeout):
            return await anext(replies, None)
    except TimeoutError:
        raise exchange.silent() from None


async def _drain(call: Any, exchange: Exchange[Any]) -> None:
    """Read the stream of a withdrawn request to its end, for a limited time."""
    with suppress(grpc.RpcError, grpc.aio.UsageError, TimeoutError):
        async with asyncio.timeout(WITHDRAWAL_TIMEOUT_S):
            async for reply in call:
                exchange.skip(reply)
                if exchange.complete:
                    break


async def _end(call: Any, answered: asyncio.Event, complete: bool) -> None:
    """Cancel an incomplete call; the server ends a complete one, which a late cancel disturbs."""
    if not complete:
        call.cancel()
    answered.set()  # releases the task that sends the requests
    if complete:
        with suppress(grpc.RpcError, TimeoutError):
            async with asyncio.timeout(WITHDRAWAL_TIMEOUT_S):
                async for _ in call:
                    pass
