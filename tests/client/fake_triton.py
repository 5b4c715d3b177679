"""A gRPC server in this process that speaks Triton's protocol and answers by a script."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

ENCODING_ERRORS = "strict"
_FORMATS = {"BOOL": "<?", "INT32": "<i", "UINT64": "<Q"}


@dataclass
class Piece:
    """One response: `texts` by sequence index; None is a response without data.

    `logprobs` is the JSON of that output, one for each text; `prompt_logprobs` is one in all.
    `section` is which section of its sequence the text is of, and of which type: a request that
    asks for sections is told.
    `reasons` are finish reasons, one for each text; "stop" for those that `finished`.
    One that is `held` comes once `FakeTriton.go_on` is set.
    """

    texts: dict[int, str] | None
    finished: tuple[int, ...] = ()
    final: bool = False
    delay_s: float = 0.0
    logprobs: tuple[str, ...] = ()
    prompt_logprobs: str = ""
    section: tuple[int, str] = (0, "content")
    reasons: tuple[str, ...] = ()
    held: bool = False


HELLO = [
    Piece({0: "Hel"}),
    Piece({0: ""}),
    Piece({0: "lo wor"}),
    Piece({0: "ld"}, finished=(0,), final=True),
]


@dataclass
class Answer:
    """To one request: the pieces, then an error as status of the call or inside a response."""

    pieces: list[Piece] = field(default_factory=list)
    error: tuple[grpc.StatusCode, str] | None = None
    error_message: str = ""


@dataclass
class Call:
    """All that came with a request: `seconds` is the deadline as gRPC tells of it."""

    inputs: dict[str, Any]
    model: str
    request_id: str
    headers: dict[str, str]
    seconds: float | None
    peer: str
    time: float = field(default_factory=time.monotonic)


@dataclass
class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer, Answer):
    """Attributes: what it answers, and what it has seen.

    `first` are the answers to the first requests, `stop_answer` is that to a request to stop.

    `requests` are the inputs of what the ensemble was asked to complete, `stopped` the ids of what
    it was asked to end, `calls` are all calls. `health` is the
    JSON of the engine's health, or empty for a server without such an input.
    """

    url: str = ""
    max_batch_size: int = 1
    first: list[Answer] = field(default_factory=list)
    stop_answer: Answer = field(
        default_factory=lambda: Answer([Piece({0: ""}, finished=(0,), final=True)])
    )
    health: str = '{"state": "ready", "num_in_flight": 3, "of the future": [1]}'
    health_error: str = ""
    ready: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    num_config_calls: int = 0
    configured: set[str] = field(default_factory=set)
    cancelled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    stopped: set[str] = field(default_factory=set)

    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=self.ready)

    def ModelConfig(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.num_config_calls += 1
        self.configured.add(request.name)
        response = service_pb2.ModelConfigResponse()
        response.config.max_batch_size = self.max_batch_size
        return response

    def ModelStreamInfer(  # noqa: N802
        self, request_iterator: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        request = next(request_iterator)
        inputs = self._note(request, context)
        if inputs.get("health"):
            yield self._health()
            return
        if inputs.get("stop") and not (self.error or self.error_message):
            self.stopped.add(request.id)
            answer = self.stop_answer
        else:
            answer = self.first.pop(0) if self.first else self
        answered = threading.Event()
        # The end of the call may find this generator between two responses, never to go on.
        context.add_callback(lambda: None if answered.is_set() else self.cancelled.set())
        for piece in answer.pieces:
            deadline = time.monotonic() + piece.delay_s
            while context.is_active() and (
                time.monotonic() < deadline or (piece.held and not self.go_on.is_set())
            ):
                if request.id in self.stopped:
                    self.cancelled.set()
                    yield response_of(Piece({0: ""}, finished=(0,), final=True))
                    return
                time.sleep(0.005)
            if not context.is_active():
                return
            asked = inputs.get("sampling_parameters", {})
            yield response_of(piece, has_sections=asked.get("return_sections", False))
        answered.set()
        if answer.error_message:
            yield service_pb2.ModelStreamInferResponse(error_message=answer.error_message)
        if answer.error is not None:
            context.abort(*answer.error)

    def _note(self, request: Any, context: grpc.ServicerContext) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
            if tensor.datatype == "BYTES":
                (length,) = struct.unpack("<I", content[:4])
                assert len(content) == 4 + length
                values[tensor.name] = content[4:].decode()
            else:
                (values[tensor.name],) = struct.unpack(_FORMATS[tensor.datatype], content)
            self.shapes.append(list(tensor.shape))
        if "sampling_parameters" in values:
            values["sampling_parameters"] = json.loads(values["sampling_parameters"])
        headers = dict(context.invocation_metadata())
        seconds = context.time_remaining()
        peer = context.peer()
        self.calls.append(Call(values, request.model_name, request.id, headers, seconds, peer))
        if request.model_name != "engine" and "stop" not in values:
            self.requests.append(values)
        return values

    def _health(self) -> Any:
        if self.health_error or not self.health:
            unknown = "unexpected inference input 'health' for model 'engine'"
            return service_pb2.ModelStreamInferResponse(error_message=self.health_error or unknown)
        response = response_of(Piece(None, final=True))
        _add(response, "health", "BYTES", _bytes([self.health.encode()]), 1)
        return response


def response_of(piece: Piece, *, has_sections: bool = False) -> Any:
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.parameters["triton_final_response"].bool_param = piece.final
    if piece.texts is None:
        return response
    texts = [text.encode(errors=ENCODING_ERRORS) for text in piece.texts.values()]
    reasons = [b"stop" if index in piece.finished else b"None" for index in piece.texts]
    reasons = [reason.encode() for reason in piece.reasons] or reasons
    _add(response, "text_output", "BYTES", _bytes(texts), len(texts))
    _add(response, "finish_reason", "BYTES", _bytes(reasons), len(texts))
    _add(response, "sequence_index", "INT32", _ints(list(piece.texts)), len(texts))
    counts = [len(text.split()) for text in piece.texts.values()]
    _add(response, "num_output_tokens", "INT32", _ints(counts), len(texts))
    _add(response, "num_input_tokens", "INT32", _ints([7]), 1)
    if has_sections:
        index, kind = piece.section
        tag = {"tag": "</think>"} if index else {}
        told = [
            [{"type": kind, "index": index, "text": each, **tag}] for each in piece.texts.values()
        ]
        contents = [json.dumps(each).encode() for each in told]
        _add(response, "sections", "BYTES", _bytes(contents), len(contents))
    if piece.logprobs:
        contents = [each.encode() for each in piece.logprobs]
        _add(response, "logprobs", "BYTES", _bytes(contents), len(contents))
    if piece.prompt_logprobs:
        _add(response, "prompt_logprobs", "BYTES", _bytes([piece.prompt_logprobs.encode()]), 1)
    return response


def _add(response: Any, name: str, datatype: str, content: bytes, length: int) -> None:
    response.infer_response.outputs.add(name=name, datatype=datatype, shape=[1, length])
    response.infer_response.raw_output_contents.append(content)


def _bytes(values: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def _ints(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def serve(
    servicer: FakeTriton,
    url: str = "localhost:0",
    credentials: grpc.ServerCredentials | None = None,
) -> tuple[grpc.Server, str]:
    """Start `servicer`; return the server and its `host:port`."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    if credentials is None:
        port = server.add_insecure_port(url)
    else:
        port = server.add_secure_port(url, credentials)
    server.start()
    return server, f"localhost:{port}"
