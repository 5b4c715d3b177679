"""AsyncTridentClient: `TridentClient` for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client import protocol
from client.protocol import Chunk, Completion, Message, SamplingOptions


class AsyncTridentClient:
    """Talks to one server from one event loop; any number of requests at once.

        async with AsyncTridentClient("localhost:8001") as client:
            async for chunk in client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="")

    Args:
        url: `host:port` of the server's gRPC service. Nothing is sent before the first request.
    """

    def __init__(self, url: str = "localhost:8001") -> None:
        self._url = url
        self._channel = grpc.aio.insecure_channel(url, options=protocol.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._batched: bool | None = None  # as the server's configuration says, once asked

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        stream: bool = False,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Complete a prompt or answer messages; as `TridentClient.generate`.

        Cancelling the task cancels the request on the server.
        """
        protocol.check_prompt(prompt, messages)
        collector = protocol.Collector(streamed=stream)
        async with aclosing(self._chunks(prompt, messages, sampling, stream, timeout)) as chunks:
            async for chunk in chunks:
                collector.add(chunk)
        return collector.completion()

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the answer piece by piece; as `TridentClient.stream`.

        Leaving the loop early cancels the request as soon as the event loop runs again; inside
        `contextlib.aclosing` it has been cancelled when the block ends.
        """
        protocol.check_prompt(prompt, messages)
        return self._chunks(prompt, messages, sampling, True, timeout)

    async def is_ready(self, timeout: float = 5.0) -> bool:
        """Tell whether the server answers and its model takes requests."""
        request = service_pb2.ModelReadyRequest(name=protocol.MODEL)
        try:
            return bool((await self._stub.ModelReady(request, timeout=timeout)).ready)
        except grpc.RpcError:
            return False

    async def close(self) -> None:
        """Cancel what is running and close the connection."""
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

    async def _chunks(
        self,
        prompt: str | None,
        messages: Sequence[Message] | None,
        sampling: SamplingOptions,
        stream: bool,
        timeout: float | None,
    ) -> AsyncGenerator[Chunk, None]:
        call = None
        complete = asyncio.Event()
        deadline = protocol.deadline(timeout)
        try:
            request = protocol.build_request(
                prompt,
                messages,
                sampling,
                stream=stream,
                batched=await self._takes_batches(timeout),
            )
            # One stream per request: an error on a shared one would not say whose it is.
            call = self._stub.ModelStreamInfer(_held_open(request, complete), timeout=timeout)
            async for response in call:
                if protocol.is_final(response):
                    complete.set()
                for chunk in protocol.read_chunks(response):
                    yield chunk
            if not complete.is_set():
                raise protocol.unfinished()
        except grpc.RpcError as error:
            raise protocol.rpc_error(error, self._url, deadline) from None
        except asyncio.CancelledError:
            # gRPC raises it as well for a call that ended under it, by close() or by a deadline
            # that struck while the request was being written.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise protocol.cancelled(deadline) from None
        finally:
            if call is not None:
                await _end(call, complete)

    async def _takes_batches(self, timeout: float | None) -> bool:
        if self._batched is None:
            request = service_pb2.ModelConfigRequest(name=protocol.MODEL)
            response = await self._stub.ModelConfig(request, timeout=timeout)
            self._batched = protocol.takes_batches(response)
        return self._batched


async def _held_open(
    request: service_pb2.ModelInferRequest, complete: asyncio.Event
) -> AsyncIterator[service_pb2.ModelInferRequest]:
    """Yield the request, and end only when it has been answered: see `client.client`."""
    yield request
    await complete.wait()


async def _end(call: Any, complete: asyncio.Event) -> None:
    """Cancel what is not complete; let the server end what is, for a late cancel disturbs it."""
    if complete.is_set():
        with suppress(grpc.RpcError):
            async for _ in call:
                pass
    else:
        call.cancel()
