"""The two ways to a server, gRPC and the gateway, as a benchmark asks and reads them.

Both are read as bytes, and what these say is looked into after the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from tritonclient.grpc import service_pb2

from client import SamplingOptions
from client.bench.errors import BenchError
from client.bench.gateway.sse import DONE, SseConnection
from client.bench.gateway.stream_reader import Arrival, Connection
from client.bench.load.http2 import Http2Connection
from client.bench.load.prompts import Prompt
from client.bench.paced_worker import METHOD
from client.bench.waves import Trace
from client.request import completion
from client.response import read_chunks

_PER_CONNECTION = 128  # streams of gRPC


class Front(Protocol):
    """A way to ask.

    Attributes:
        name: for tables.
        per_connection: streams of one connection.
    """

    name: str
    per_connection: int

    def connection(self, prompts: Sequence[Prompt], sampling: SamplingOptions) -> Connection:
        """Return a connection with requests to complete `prompts`."""
        ...

    def is_last(self, message: bytes) -> bool:
        """Tell whether a message is the last of its stream."""
        ...

    def trace(self, arrivals: Sequence[Arrival]) -> Trace:
        """Return when tokens came, and how many.

        Raises:
            BenchError: the request failed.
        """
        ...


class GrpcFront:
    """gRPC to the ensemble; a `Front`."""

    name = "gRPC"
    per_connection = _PER_CONNECTION

    def __init__(self, url: str, model: str) -> None:
        self._host, _, self._port = url.rpartition(":")
        self._model = model

    def connection(self, prompts: Sequence[Prompt], sampling: SamplingOptions) -> Connection:
        """As `Front.connection`."""
        connection = Http2Connection(self._host, int(self._port), METHOD)
        for prompt in prompts:
            asked = completion(
                prompt.text, None, sampling, priority=0, request_id="", model=self._model
            )
            connection.send(asked.message(batched=True, timeout=None).SerializeToString())
        return connection

    def is_last(self, message: bytes) -> bool:
        """As `Front.is_last`."""
        reply = service_pb2.ModelStreamInferResponse.FromString(message)
        parameters = reply.infer_response.parameters
        return bool(reply.error_message) or bool(parameters["triton_final_response"].bool_param)

    def trace(self, arrivals: Sequence[Arrival]) -> Trace:
        """As `Front.trace`."""
        trace = Trace()
        for at, message in arrivals:
            reply = service_pb2.ModelStreamInferResponse.FromString(message)
            if reply.error_message:
                raise BenchError(f"a request failed: {reply.error_message}")
            if count := sum(c.num_output_tokens for c in read_chunks(reply.infer_response)):
                trace.arrivals.append(at)
                trace.num_tokens += count
        return trace


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class GatewayFront:
    """Events of the gateway's `/v1/completions`; a `Front`."""

    name = "gateway"
    per_connection = 1

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    def connection(self, prompts: Sequence[Prompt], sampling: SamplingOptions) -> Connection:
        """As `Front.connection`."""
        (prompt,) = prompts
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"prompt": prompt.text, **sampling, **streaming}
        return SseConnection(self._host, self._port, "/v1/completions", body)

    def is_last(self, message: bytes) -> bool:
        """As `Front.is_last`."""
        return message == DONE

    def trace(self, arrivals: Sequence[Arrival]) -> Trace:
        """As `Front.trace`. Each event has tokens, and the last one their number."""
        trace = Trace()
        for at, message in arrivals:
            if message == DONE:
                break
            event = msgspec.json.decode(message, type=_Event)
            if event.error is not None:
                raise BenchError(f"a request failed: {event.error}")
            if event.choices:
                trace.arrivals.append(at)
            if event.usage is not None:
                trace.num_tokens = event.usage.completion_tokens
        return trace
