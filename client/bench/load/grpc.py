"""The ensemble over gRPC, read as bytes at a small part of a client's cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from tritonclient.grpc import service_pb2

from client import Chunk
from client.bench.errors import BenchError
from client.bench.load.connector import Answer, Connector, Piece, RequestFailedError
from client.bench.load.http2 import Http2Connection
from client.bench.load.plan import Turn
from client.bench.load.record import Target
from client.request import completion
from client.response import read_chunks

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_PER_CONNECTION = 128  # streams at once


class _Connection:
    """An HTTP/2 connection that an event loop reads and writes."""

    def __init__(self, host: str, port: int) -> None:
        self._http2 = Http2Connection(host, port, _METHOD)
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, tuple[list[Piece], asyncio.Future[None]]] = {}
        self._is_writing = False
        self._loop.add_reader(self._http2.socket, self._read)

    @property
    def num_streams(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    async def ask(self, message: bytes, pieces: list[Piece]) -> None:
        """Send one message and collect the answers."""
        number = self._http2.send(message)
        ended: asyncio.Future[None] = self._loop.create_future()
        self._streams[number] = pieces, ended
        self._write()
        try:
            await ended
        finally:
            self._streams.pop(number, None)

    def close(self) -> None:
        """Close it: the server cancels what still runs."""
        self._loop.remove_reader(self._http2.socket)
        self._loop.remove_writer(self._http2.socket)
        self._http2.close()

    def _read(self) -> None:
        now = time.monotonic()
        try:
            for number, message in self._http2.read():
                if (stream := self._streams.get(number)) is None:
                    continue
                if message:
                    stream[0].append((now, message))
                # The stream is open until it is closed from here: the answer says that it ends.
                if (not message or _is_last(message)) and not stream[1].done():
                    stream[1].set_result(None)
        except (BenchError, OSError) as error:
            self._loop.remove_reader(self._http2.socket)
            for _, ended in self._streams.values():
                if not ended.done():
                    ended.set_exception(RequestFailedError(str(error)))
            return
        self._write()  # a window may have opened

    def _write(self) -> None:
        self._http2.write()
        if self._http2.wants_to_write and not self._is_writing:
            self._loop.add_writer(self._http2.socket, self._write)
            self._is_writing = True
        elif self._is_writing and not self._http2.wants_to_write:
            self._loop.remove_writer(self._http2.socket)
            self._is_writing = False


class GrpcConnector(Connector):
    """Connections to one ensemble, as many as its requests need."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connections: list[_Connection] = []

    async def ask(self, turn: Turn, parameters: dict[str, Any], pieces: list[Piece]) -> None:
        """As `Connector.ask`."""
        asked = completion(
            turn.text, None, parameters, priority=0, request_id="", model=self._target.model
        )
        message = asked.message(batched=True, timeout=None).SerializeToString()
        await self._connection().ask(message, pieces)

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
        """As `Connector.close`."""
        for each in self._connections:
            each.close()

    def _connection(self) -> _Connection:
        for each in self._connections:
            if each.num_streams < _PER_CONNECTION:
                return each
        host, _, port = self._target.url.rpartition(":")
        self._connections.append(_Connection(host, int(port)))
        return self._connections[-1]


def _is_last(message: bytes) -> bool:
    reply = service_pb2.ModelStreamInferResponse.FromString(message)
    parameters = reply.infer_response.parameters
    return bool(reply.error_message) or parameters["triton_final_response"].bool_param


def _responses(pieces: list[Piece]) -> Iterator[tuple[float, list[Chunk]]]:
    for at, message in pieces:
        reply = service_pb2.ModelStreamInferResponse.FromString(message)
        if reply.error_message:
            refused = "queue" in reply.error_message
            raise RequestFailedError(f"a request failed: {reply.error_message}", refused=refused)
        yield at, list(read_chunks(reply.infer_response))
