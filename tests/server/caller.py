"""What a client without our client package does: bare gRPC and HTTP, for tests."""

from __future__ import annotations

import json
import queue
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

_DTYPES = {
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "UINT8": "u1",
    "FP32": "<f4",
}
TIMEOUT_S = 60


class InferError(Exception):
    """The server answered with an error."""


class Caller:
    """Sends requests to one server, each on a gRPC stream of its own."""

    def __init__(self, grpc_url: str, http_url: str, model: str = "ensemble") -> None:
        """`model` is the one that is asked by default."""
        self.http_url = http_url
        self._model = model
        self._channel = grpc.insecure_channel(grpc_url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._inputs: dict[str, dict[str, tuple[str, bool]]] = {}

    def stream(
        self, model: str | None = None, parameters: dict[str, Any] | None = None, **inputs: Any
    ) -> Iterator[dict[str, list[Any]]]:
        """Yield the outputs of each response; `final` is there on the last. Closing it cancels."""
        # Release 24.10 overlooks one in ten cancellations of a stream whose client has said that
        # it sends no more requests; so the end of the requests comes only after the answer.
        requests: queue.SimpleQueue[service_pb2.ModelInferRequest | None] = queue.SimpleQueue()
        requests.put(self.request(model, parameters=parameters, **inputs))
        call = self._stub.ModelStreamInfer(iter(requests.get, None), timeout=TIMEOUT_S)
        error = ""
        try:
            for message in call:
                response = message.infer_response
                last = response.parameters["triton_final_response"].bool_param
                error = message.error_message
                if last or error:
                    requests.put(None)  # the server ends the stream in turn
                if not error:
                    yield {**read_outputs(response), **({"final": [True]} if last else {})}
        except GeneratorExit:
            call.cancel()
            raise
        finally:
            requests.put(None)
        if error:
            raise InferError(error)

    def collect(self, model: str | None = None, **inputs: Any) -> list[dict[str, list[Any]]]:
        """Return all responses."""
        return list(self.stream(model, **inputs))

    def one(self, model: str | None = None, **inputs: Any) -> dict[str, list[Any]]:
        """Return the response, of which there must be one."""
        (response,) = self.collect(model, **inputs)
        return response

    def text(self, **inputs: Any) -> str:
        """Return the streamed text without the prompt."""
        return "".join(r["text_output"][0] for r in self.stream(stream=True, **inputs))

    def post(self, path: str, body: Any) -> tuple[int, str]:
        """POST `body` (JSON, or bytes as they are); return status and text."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self.http_url}{path}", data)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def generate(self, body: Any, model: str | None = None) -> tuple[int, dict[str, Any]]:
        """POST to `generate`; return status and JSON."""
        status, text = self.post(f"/v2/models/{model or self._model}/generate", body)
        return status, json.loads(text)

    def generate_stream(self, body: Any, model: str | None = None) -> list[dict[str, Any]]:
        """POST to `generate_stream`; return the events."""
        status, text = self.post(f"/v2/models/{model or self._model}/generate_stream", body)
        assert status == 200, text
        events = [event for event in text.split("\n\n") if event]
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def close(self) -> None:
        self._channel.close()

    def request(
        self,
        model: str | None = None,
        *,
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        **inputs: Any,
    ) -> service_pb2.ModelInferRequest:
        """Return the message that asks `model` for `inputs`, typed and shaped as it declares."""
        model = model or self._model
        request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for name, value in (parameters or {}).items():
            kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
            setattr(request.parameters[name], kind, value)
        for name, value in inputs.items():
            array, datatype, batched = self._array(model, name, value)
            shape = [1, *array.shape] if batched else array.shape
            request.inputs.add(name=name, datatype=datatype, shape=shape)
            request.raw_input_contents.append(_raw(array))
        return request

    def _array(self, model: str, name: str, value: Any) -> tuple[np.ndarray, str, bool]:
        if model not in self._inputs:
            metadata = self._stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=model))
            self._inputs[model] = {i.name: (i.datatype, len(i.shape) == 2) for i in metadata.inputs}
        datatype, batched = self._inputs[model][name]
        values = value if isinstance(value, list) else [value]
        if datatype == "BYTES":
            data = [v if isinstance(v, bytes) else v.encode() for v in values]
            return np.array(data, dtype=object), datatype, batched
        return np.array(values, dtype=_DTYPES.get(datatype, "?")), datatype, batched


def _raw(array: np.ndarray) -> bytes:
    if array.dtype == object:
        return b"".join(struct.pack("<I", len(v)) + v for v in array)
    return array.tobytes()


def read_outputs(response: service_pb2.ModelInferResponse) -> dict[str, list[Any]]:
    """Return the values of each output tensor, strings decoded."""
    outputs: dict[str, list[Any]] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            values, offset = [], 0
            while offset < len(raw):
                (length,) = struct.unpack_from("<I", raw, offset)
                values.append(raw[offset + 4 : offset + 4 + length].decode())
                offset += 4 + length
            outputs[output.name] = values
        else:
            outputs[output.name] = np.frombuffer(raw, _DTYPES[output.datatype]).tolist()
    return outputs
