"""The ensemble over gRPC; messages are read as bytes, at a part of a client's cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from client.bench.load.connector import Connector, Event, Piece, RequestFailedError
from client.bench.load.prompts import Turn
from client.bench.load.record import Target
from client.request import completion
from client.response import read_chunks

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_PER_CHANNEL = 128  # streams at once
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # it would be measured too
)


class GrpcConnector(Connector):
    """Channels to one ensemble, as many as its requests need."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._channels: list[grpc.aio.Channel] = []
        self._streams: list[int] = []  # by channel

    async def ask(self, turn: Turn, parameters: dict[str, Any], pieces: list[Piece]) -> None:
        """As `Connector.ask`."""
        asked = completion(
            turn.text, None, parameters, priority=0, request_id="", model=self._target.model
        )
        message = asked.message(batched=True, timeout=None).SerializeToString()
        index = self._next_channel()
        self._streams[index] += 1
        try:
            call = self._channels[index].stream_stream(_METHOD)()
            await call.write(message)
            await call.done_writing()
            async for answer in call:
                pieces.append((time.monotonic(), answer))  # noqa: PERF401 one by one: it may be cut
        except grpc.RpcError as error:
            raise RequestFailedError(f"a request failed: {error.details()}") from None
        finally:
            self._streams[index] -= 1

    def _next_channel(self) -> int:
        """Return the index of a channel with room."""
        for index, count in enumerate(self._streams):
            if count < _PER_CHANNEL:
                return index
        self._channels.append(grpc.aio.insecure_channel(self._target.url, _OPTIONS))
        self._streams.append(0)
        return len(self._streams) - 1

    def events(self, pieces: list[Piece]) -> Iterator[Event]:
        """As `Connector.events`."""
        for at, message in pieces:
            reply = service_pb2.ModelStreamInferResponse.FromString(message)
            if reply.error_message:
                yield Event(at, error=f"a request failed: {reply.error_message}")
                return
            chunks = list(read_chunks(reply.infer_response))
            yield Event(
                at,
                "".join(chunk.text for chunk in chunks),
                sum(chunk.num_output_tokens for chunk in chunks),
                prompt_tokens=max((chunk.num_input_tokens for chunk in chunks), default=0),
                cached_tokens=max((chunk.num_cached_tokens for chunk in chunks), default=0),
            )

    async def close(self) -> None:
        """As `Connector.close`: the server cancels what still runs."""
        for each in self._channels:
            await each.close()
