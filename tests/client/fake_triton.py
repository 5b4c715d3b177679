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


@dataclass
class Piece:
    """One response: `texts` by sequence index; None is a response without data."""

    texts: dict[int, str] | None
    finished: tuple[int, ...] = ()
    final: bool = False
    delay_s: float = 0.0


@dataclass
class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Attributes: what it answers, and what it has seen."""

    url: str = ""
    max_batch_size: int = 1
    pieces: list[Piece] = field(default_factory=list)
    error: tuple[grpc.StatusCode, str] | None = None  # after the pieces
    error_message: str = ""  # after the pieces, inside a response
    ready: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    num_config_calls: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=self.ready)

    def ModelConfig(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.num_config_calls += 1
        response = service_pb2.ModelConfigResponse()
        response.config.max_batch_size = self.max_batch_size
        return response

    def ModelStreamInfer(  # noqa: N802
        self, request_iterator: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        self._note(next(request_iterator))
        answered = threading.Event()
        # The end of the call may find this generator between two responses, never to go on.
        context.add_callback(lambda: None if answered.is_set() else self.cancelled.set())
        for piece in self.pieces:
            deadline = time.monotonic() + piece.delay_s
            while time.monotonic() < deadline and context.is_active():
                time.sleep(0.005)
            if not context.is_active():
                return
            yield _response(piece)
        answered.set()
        if self.error_message:
            yield service_pb2.ModelStreamInferResponse(error_message=self.error_message)
        if self.error is not None:
            context.abort(*self.error)

    def _note(self, request: Any) -> None:
        values: dict[str, Any] = {}
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
            if tensor.datatype == "BYTES":
                (length,) = struct.unpack("<I", content[:4])
                assert len(content) == 4 + length
                values[tensor.name] = content[4:].decode()
            else:
                assert tensor.datatype == "BOOL"
                values[tensor.name] = bool(content[0])
            self.shapes.append(list(tensor.shape))
        values["sampling_parameters"] = json.loads(values["sampling_parameters"])
        self.requests.append(values)


def _response(piece: Piece) -> Any:
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.parameters["triton_final_response"].bool_param = piece.final
    if piece.texts is None:
        return response
    texts = [text.encode() for text in piece.texts.values()]
    reasons = [b"stop" if index in piece.finished else b"None" for index in piece.texts]
    _add(response, "text_output", "BYTES", _bytes(texts), len(texts))
    _add(response, "finish_reason", "BYTES", _bytes(reasons), len(texts))
    _add(response, "sequence_index", "INT32", _ints(list(piece.texts)), len(texts))
    counts = [len(text.split()) for text in piece.texts.values()]
    _add(response, "num_output_tokens", "INT32", _ints(counts), len(texts))
    _add(response, "num_input_tokens", "INT32", _ints([7]), 1)
    return response


def _add(response: Any, name: str, datatype: str, content: bytes, length: int) -> None:
    response.infer_response.outputs.add(name=name, datatype=datatype, shape=[1, length])
    response.infer_response.raw_output_contents.append(content)


def _bytes(values: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def _ints(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def serve(servicer: FakeTriton) -> tuple[grpc.Server, str]:
    """Start `servicer`; return the server and its `host:port`."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("localhost:0")
    server.start()
    return server, f"localhost:{port}"
