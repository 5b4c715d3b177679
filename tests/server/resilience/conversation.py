"""One request and its answer, over each transport, with each way of disconnecting."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.server.caller import read_outputs
from tests.server.resilience.link import Link

COMPLETE = ("stop", "length")
_LINE_BYTES = 2**22  # maximum line length, well above the longest answer


@dataclass
class Answer:
    """The responses so far.

    Attributes:
        pieces: text per response; for the engine, its token ids as words.
        finish_reason: of the last response that had one.
        ended: whether the server has ended the answer.
    """

    pieces: list[str] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""
    ended: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def outcome(self) -> str:
        """`complete`, `error`, `abort`, `cut off` (ended without any of these) or `left`."""
        if self.error:
            return "error"
        if not self.ended:
            return "left"
        if self.finish_reason in COMPLETE:
            return "complete"
        return "abort" if self.finish_reason == "abort" else "cut off"

    def take(self, outputs: Mapping[str, Any]) -> str:
        """Add one response and return its piece."""
        ids = outputs.get("token_ids", [])
        ids = ids if isinstance(ids, list) else [ids]  # JSON has a single value unwrapped
        piece = _first(outputs.get("text_output", "")) or "".join(f"{i} " for i in ids)
        self.pieces.append(piece)
        reason = _first(outputs.get("finish_reason", ""))
        if reason not in ("", "None"):
            self.finish_reason = reason
        return piece


def _first(value: Any) -> str:
    return str(value[0] if value else "") if isinstance(value, list) else str(value)


class Conversation(ABC):
    """Sends its request when iterated, and yields a piece per response, collected in `answer`."""

    def __init__(self) -> None:
        self.answer = Answer()
        self._sent = asyncio.Event()
        self._gone = False

    async def pieces(self) -> AsyncIterator[str]:
        """Yield pieces until the server ends the answer or `leave` was called."""
        try:
            async with aclosing(self._responses()) as responses:
                async for outputs in responses:
                    yield self.answer.take(outputs)
            self.answer.ended = not self._gone
        except UnicodeDecodeError as error:
            when = "after leaving" if self._gone else "while receiving"
            self.answer.error = f"{when}, no UTF-8 came: {error.object!r}"
        except (OSError, grpc.RpcError, asyncio.CancelledError) as error:
            if not self._gone:  # errors of the connection after leaving are expected
                if isinstance(error, asyncio.CancelledError):
                    raise
                self.answer.error = _reason(error)
        finally:
            await self._close()

    async def run(self) -> Answer:
        """Receive the whole answer."""
        async for _ in self.pieces():
            pass
        return self.answer

    async def leave(self) -> None:
        """Disconnect in the way of the class; a waiting iteration ends."""
        await self._sent.wait()
        self._gone = True
        await self._leave()

    @abstractmethod
    def _responses(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """Send the request, set `_sent`, and yield the outputs of each response."""

    @abstractmethod
    async def _leave(self) -> None: ...

    @abstractmethod
    async def _close(self) -> None: ...


def _reason(error: BaseException) -> str:
    details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return f"{type(error).__name__}: {details}"


class GrpcConversation(Conversation):
    """A gRPC stream; leaving cancels it."""

    def __init__(
        self, channel: grpc.aio.Channel, request: service_pb2.ModelInferRequest, timeout_s: float
    ) -> None:
        super().__init__()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._request = request
        self._timeout_s = timeout_s
        self._answered = asyncio.Event()
        self._call: Any = None

    async def _responses(self) -> AsyncGenerator[Mapping[str, Any], None]:
        self._call = self._stub.ModelStreamInfer(self._held_open(), timeout=self._timeout_s)
        self._sent.set()
        async for message in self._call:
            response = message.infer_response
            if message.error_message:
                self.answer.error = message.error_message
            elif response.outputs:
                yield read_outputs(response)
            if message.error_message or response.parameters["triton_final_response"].bool_param:
                self._answered.set()
        if not self._answered.is_set() and not self._gone:
            self.answer.error = "the stream ended before the final response"

    async def _held_open(self) -> AsyncIterator[service_pb2.ModelInferRequest]:
        # Release 24.10 misses some cancellations of a stream whose client has closed its sending
        # side, so that is closed only after the answer.
        yield self._request
        await self._answered.wait()

    async def _leave(self) -> None:
        self._call.cancel()

    async def _close(self) -> None:
        if self._call is not None and not self._answered.is_set():
            self._call.cancel()
        self._answered.set()


class LostConversation(GrpcConversation):
    """A gRPC stream on its own connection; leaving resets the connection."""

    def __init__(self, url: str, request: service_pb2.ModelInferRequest, timeout_s: float) -> None:
        self._link = Link(url)
        self._channel = grpc.aio.insecure_channel(self._link.path)
        super().__init__(self._channel, request, timeout_s)

    async def _responses(self) -> AsyncGenerator[Mapping[str, Any], None]:
        await self._link.open()
        async with aclosing(super()._responses()) as responses:
            async for outputs in responses:
                yield outputs

    async def _leave(self) -> None:
        self._link.cut()

    async def _close(self) -> None:
        await super()._close()
        await self._channel.close()
        await self._link.close()


class HttpConversation(Conversation):
    """`generate_stream`, or `generate` without streaming; leaving closes the connection."""

    def __init__(
        self, url: str, model: str, inputs: Mapping[str, Any], request_id: str, timeout_s: float
    ) -> None:
        super().__init__()
        self._host, port = url.rsplit(":", 1)
        self._port = int(port)
        self._timeout_s = timeout_s
        self._writer: asyncio.StreamWriter | None = None
        action = "generate_stream" if inputs.get("stream") else "generate"
        body = json.dumps({**inputs, **({"id": request_id} if request_id else {})}).encode()
        self._request = (
            f"POST /v2/models/{model}/{action} HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def _responses(self) -> AsyncGenerator[Mapping[str, Any], None]:
        reader, self._writer = await asyncio.open_connection(
            self._host, self._port, limit=_LINE_BYTES
        )
        self._writer.write(self._request)
        self._sent.set()
        whole = False
        async with asyncio.timeout(self._timeout_s):
            # Each event, or the whole answer, is one line with this prefix; chunks are arbitrary.
            async for line in reader:
                if line.startswith((b"data: {", b"{")) and line.endswith(b"\n"):
                    outputs = json.loads(line.removeprefix(b"data: "))
                    self.answer.error = self.answer.error or outputs.get("error", "")
                    yield outputs
                whole = whole or line == b"0\r\n"
        if not (whole or self.answer.error or self._gone):
            self.answer.error = "the connection was closed before the last chunk"

    async def _leave(self) -> None:
        await self._close()

    async def _close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
