"""Sends a case and returns the raw reply."""

from __future__ import annotations

import asyncio
import http.client
import io
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from tests.server.resilience.fuzzing.case import Case

TIMEOUT_S = 60.0
_SERVICE = "/inference.GRPCInferenceService/"
_NUM_CHANNELS = 4


@dataclass(frozen=True)
class Reply:
    """The reply to a case.

    Attributes:
        error: the error message; None if there was no error, or no reply.
        answered: whether there was a response without an error.
        text: the whole reply, to check what it reveals.
        hung: nothing more arrived for `TIMEOUT_S`.
        refused: there was no server.
    """

    error: str | None = None
    answered: bool = False
    text: str = ""
    hung: bool = False
    refused: bool = False


class Wire:
    """Connections to one server; an asynchronous context manager."""

    def __init__(self, grpc_url: str, http_url: str) -> None:
        self._host, port = http_url.rsplit(":", 1)
        self._port = int(port)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_metadata_size", 2**16)]
        self._channels = [
            grpc.aio.insecure_channel(grpc_url, options=options) for _ in range(_NUM_CHANNELS)
        ]
        self._streams = [c.stream_stream(f"{_SERVICE}ModelStreamInfer") for c in self._channels]
        self._unaries = [c.unary_unary(f"{_SERVICE}ModelInfer") for c in self._channels]

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def send(self, case: Case, index: int) -> Reply:
        """Send `case`; `index` distributes cases over the connections."""
        channel = index % _NUM_CHANNELS
        try:
            if case.transport == "http":
                async with asyncio.timeout(TIMEOUT_S):
                    return await self._http(case)
            if case.transport == "stream":
                return await _stream(self._streams[channel], case)
            return await _unary(self._unaries[channel], case)
        except TimeoutError:
            return Reply(hung=True)
        except ConnectionRefusedError:
            return Reply(refused=True)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return Reply(hung=True)
            if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in (error.details() or ""):
                return Reply(refused=True)
            return Reply(error=error.details() or "", text=error.details() or "")

    async def _http(self, case: Case) -> Reply:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        received = b""
        try:
            writer.write(case.payload)
            if case.may_close:  # it waits for more, and sees the end of the stream as a lost client
                writer.write_eof()
            received = await reader.read(-1)
        except OSError:
            pass  # the server may close while we are still writing
        finally:
            writer.transport.abort()
        return _read_http(received)


async def _stream(call: Any, case: Case) -> Reply:
    answered = asyncio.Event()

    async def held_open() -> Any:
        yield case.payload
        await answered.wait()

    texts, error, any_response = [], None, False
    stream = call(held_open(), timeout=TIMEOUT_S, metadata=case.metadata)
    try:
        async for data in stream:
            message = service_pb2.ModelStreamInferResponse.FromString(data)
            any_response = True
            texts.append(message.error_message)
            error = message.error_message or error
            if error or message.infer_response.parameters["triton_final_response"].bool_param:
                answered.set()
            elif len(texts) == case.cancel_after:
                stream.cancel()
                break
    finally:
        answered.set()
    return Reply(error, any_response and error is None, " ".join(texts))


async def _unary(call: Any, case: Case) -> Reply:
    await call(case.payload, timeout=TIMEOUT_S, metadata=case.metadata)
    return Reply(answered=True)


def _read_http(data: bytes) -> Reply:
    """Parse a response; anything else counts as no reply."""
    response = http.client.HTTPResponse(_Bytes(data))  # type: ignore[arg-type]
    try:
        response.begin()
        text = response.read().decode("utf-8", "replace")
    except (http.client.HTTPException, ValueError):
        return Reply(text=data.decode("utf-8", "replace"))
    if response.status >= 400:
        # Without a body, the HTTP reason phrase is the message.
        return Reply(text.strip() or response.reason, False, text)
    if '{"error":' in text:  # of a stream that has begun
        return Reply(text, False, text)
    return Reply(None, True, text)


class _Bytes:
    """The part of a socket that `HTTPResponse` needs."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)
