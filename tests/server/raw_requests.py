"""Requests as their bytes, over gRPC and HTTP, that no client of ours would send."""

from __future__ import annotations

import http.client
from typing import Any

from tritonclient.grpc import service_pb2

from engine.launch.server import TritonServer

Request = service_pb2.ModelInferRequest
NOT_SEALED = "is set by the engine stage"


def request(model: str, *inputs: tuple[str, str, list[int], bytes], **fields: Any) -> Request:
    message = Request(model_name=model, **fields)
    for name, datatype, shape, raw in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(raw)
    return message


def http_request(
    server: TritonServer, method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.http_url, timeout=60)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()
