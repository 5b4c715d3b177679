"""The ensemble over gRPC; messages are read as bytes, at a part of a client's cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from client import Chunk
from client.bench.load.connector import Answer, Connector, Piece, RequestFailedError
from client.bench.load.prompts import Turn
from client.bench.load.record import Target
from client.request import completion
from client.response import read_chunks

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_PER_CHANNEL = 128  # streams at once
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))


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
        place = self._place()
        self._streams[place] += 1
        try:
            call = self._channels[place].stream_stream(_METHOD)()
            await call.write(message)
            await call.done_writing()
            async for answer in call:
                pieces.append((time.monotonic(), answer))  # noqa: PERF401 one by one: it may be cut
        except grpc.RpcError as error:
            raise RequestFailedError(f"a request failed: {error.details()}") from None
        finally:
            self._streams[place] -= 1

    def _place(self) -> int:
        """Return a channel with room."""
        for place, count in enumerate(self._streams):
            if count < _PER_CHANNEL:
                return place
        self._channels.append(grpc.aio.insecure_channel(self._target.url, _OPTIONS))
        self._streams.append(0)
        return len(self._streams) - 1

    def decode(self, pieces: list[Piece]) -> Answer:
        """As `Connector.decode`."""
        answer = Answer([], "", 0, 0)
        for at, chunks in _responses(pieces):
            if count := sum(chunk.num_output_tokens for chunk in chunks):
                answer.arrivals.append((at, count))
            answer = answer._replace(
                text=answer.text + "".join(chunk.text for chunk in chunks),
                prompt_tokens=max(answer.prompt_tokens, *(c.num_input_tokens for c in chunks), 0),
                cached_tokens=max(answer.cached_tokens, *(c.num_cached_tokens for c in chunks), 0),
            )
        return answer

    async def close(self) -> None:
        """As `Connector.close`: the server cancels what still runs."""
        for each in self._channels:
            await each.close()


def _responses(pieces: list[Piece]) -> Iterator[tuple[float, list[Chunk]]]:
    for at, message in pieces:
        reply = service_pb2.ModelStreamInferResponse.FromString(message)
        if reply.error_message:
            refused = "queue" in reply.error_message
            raise RequestFailedError(f"a request failed: {reply.error_message}", refused=refused)
        yield at, list(read_chunks(reply.infer_response))
