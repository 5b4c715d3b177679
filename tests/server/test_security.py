"""What somebody with bad intentions sends: he learns nothing, and harms nobody."""

from __future__ import annotations

import http.client
import json
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import msgspec
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine.launch.server import TritonServer
from engine.protocol import Chunk, DetokenizerInput
from tests.server.caller import Caller, read_outputs

pytestmark = pytest.mark.server

JUNK = bytes(range(128, 192))
ID = struct.pack("<i", 1)
GENERATE = "/v2/models/ensemble/generate"
Request = service_pb2.ModelInferRequest


@pytest.fixture(scope="module", autouse=True)
def _quiet_log(server: TritonServer) -> Iterator[None]:
    """Nothing that is sent here is worth a traceback."""
    before = len(server.log)
    yield
    assert "internal error" not in server.log[before:]
    assert "Traceback" not in server.log[before:]


@pytest.fixture(scope="module")
def stub(server: TritonServer) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def request(model: str, *inputs: tuple[str, str, list[int], bytes], **fields: Any) -> Request:
    message = Request(model_name=model, **fields)
    for name, datatype, shape, raw in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(raw)
    return message


def strings(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def shared_memory_request() -> Request:
    message = request("ensemble")
    given = message.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    given.parameters["shared_memory_region"].string_param = "region"
    given.parameters["shared_memory_byte_size"].int64_param = 5
    return message


def check_nothing_leaks(text: str) -> None:
    for leak in ("Traceback", 'File "', ".py", "/", "internal error"):
        assert leak not in text, text


TOKENS = ("input_ids", "INT32", [1, 1], ID)
TEXT = ("text_input", "BYTES", [1, 1], strings(b"hi"))
OURS = "is for the responses of the engine"
BAD_REQUESTS = {
    "detokenizer-junk": (
        request("detokenizer", ("detokenizer_input", "UINT8", [1, 64], JUNK)),
        OURS,
    ),
    "detokenizer-empty": (
        request("detokenizer", ("detokenizer_input", "UINT8", [1, 0], b"")),
        OURS,
    ),
    "detokenizer-type": (
        request("detokenizer", ("detokenizer_input", "INT32", [1, 1], ID)),
        "INT32",
    ),
    "detokenizer-batch": (
        request("detokenizer", ("detokenizer_input", "UINT8", [2, 2], ID)),
        "batch",
    ),
    "detokenizer-nothing": (request("detokenizer"), "expected 1 inputs"),
    "engine-options": (
        request("engine", TOKENS, ("response_options", "UINT8", [1, 64], JUNK)),
        "response_options: is for the tokenizer stage",
    ),
    "engine-ids": (
        request("engine", ("input_ids", "INT32", [1, 2], b"\xff" * 8)),
        "input_ids: token id -1 is outside the vocabulary",
    ),
    "engine-short": (
        request("engine", ("input_ids", "INT32", [1, 2], b"\xff" * 7)),
        "size mismatch",
    ),
    "engine-text": (
        request("engine", TOKENS, ("sampling_parameters", "BYTES", [1, 1], strings(JUNK))),
        "sampling_parameters: is not valid UTF-8",
    ),
    "tokenizer-text": (
        request("tokenizer", ("text_input", "BYTES", [1, 1], strings(JUNK))),
        "text_input: is not valid UTF-8",
    ),
    "tokenizer-bytes": (
        request("tokenizer", ("text_input", "BYTES", [1, 1], b"\xff" * 4)),
        "incomplete string data",
    ),
    "unknown-input": (request("ensemble", ("nope", "BYTES", [1, 1], strings(b"x"))), "nope"),
    "unknown-model": (request("nope", TEXT), "unknown model"),
    "unknown-version": (request("ensemble", TEXT, model_version="99"), "version 99"),
    "no-version": (request("ensemble", TEXT, model_version="x"), "should be an integral value"),
    "shape": (request("ensemble", ("text_input", "BYTES", [1, 2**40], b"")), "shape"),
    "negative-shape": (request("ensemble", ("text_input", "BYTES", [1, -1], b"")), "dimensions"),
    "batch": (request("ensemble", ("text_input", "BYTES", [7, 1], strings(*[b"a"] * 7))), "batch"),
    "twice": (request("ensemble", TEXT, TEXT), "already exists"),
    "long-id": (request("ensemble", TEXT, id="y" * 1_000_000), "request id: has 1000000"),
    "shared-memory": (shared_memory_request(), "Unable to find shared memory region"),
}


@pytest.mark.parametrize(("message", "text"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_grpc_errors_say_what_is_wrong_and_no_more(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, message: Request, text: str
) -> None:
    (answer,) = stub.ModelStreamInfer(iter([message]), timeout=30)
    assert text in answer.error_message
    check_nothing_leaks(answer.error_message)


def test_the_code_of_a_forged_message(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(BAD_REQUESTS["detokenizer-junk"][0], timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


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


def tensor(**fields: Any) -> bytes:
    return json.dumps({"inputs": [{"name": "detokenizer_input", **fields}]}).encode()


INFER = "/v2/models/detokenizer/infer"
BAD_HTTP: dict[str, tuple[str, str, bytes | None, dict[str, str]]] = {
    "no-json": ("POST", GENERATE, b"{", {}),
    "no-object": ("POST", GENERATE, b"[]", {}),
    "nothing": ("POST", GENERATE, b"", {}),
    "deep": ("POST", GENERATE, b"[" * 200_000, {}),
    "null": ("POST", GENERATE, b'{"text_input": null}', {}),
    "big-number": ("POST", GENERATE, b'{"text_input": "a", "max_tokens": 1e999}', {}),
    "no-post": ("GET", GENERATE, None, {}),
    "path": ("GET", "/v2/../../etc", None, {}),
    "encoded-path": ("GET", "/v2/models/..%2f..%2fetc/config", None, {}),
    "forged": ("POST", INFER, tensor(datatype="UINT8", shape=[1, 3], data=[1, 2, 3]), {}),
    "forged-text": ("POST", "/v2/models/detokenizer/generate", b'{"detokenizer_input": [1]}', {}),
    "no-type": ("POST", INFER, tensor(datatype="FP99", shape=[1, 1], data=[1]), {}),
    "no-shape": ("POST", INFER, tensor(shape=[-9]), {}),
    "options": (
        *("POST", "/v2/models/engine/generate"),
        b'{"input_ids": [1], "response_options": [1]}',
        {},
    ),
    "json-size": ("POST", INFER, b"{}", {"Inference-Header-Content-Length": "-5"}),
    "long-json-size": ("POST", GENERATE, b"{}", {"Inference-Header-Content-Length": "99999"}),
    "no-gzip": ("POST", GENERATE, b"no gzip", {"Content-Encoding": "gzip"}),
    # 10 MB: a server with the usual stack of 8 MB would crash.
    "long-body": ("POST", GENERATE, b'{"text_input": "%s"}' % (b"x" * 10_000_000), {}),
}


@pytest.mark.parametrize("sent", BAD_HTTP.values(), ids=BAD_HTTP)
def test_http_errors_say_what_is_wrong_and_no_more(
    server: TritonServer, sent: tuple[str, str, bytes | None, dict[str, str]]
) -> None:
    status, text = http_request(server, *sent)
    assert status >= 400
    assert json.loads(text)["error"]
    check_nothing_leaks(text)


def test_headers_without_end_are_cut_off(server: TritonServer) -> None:
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        http_request(server, "GET", "/v2/health/ready", None, {"X": "a" * 10_000_000})
    assert http_request(server, "GET", "/v2/health/ready", None, {})[0] == 200


ADMINISTRATIVE = [
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/engine/load"),
    ("POST", "/v2/repository/models/engine/unload"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/models/engine/trace/setting"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/x/register"),
    ("GET", "/v2/cudasharedmemory/status"),
]


@pytest.mark.parametrize(("method", "path"), ADMINISTRATIVE)
def test_administration_is_closed_over_http(server: TritonServer, method: str, path: str) -> None:
    for headers in ({}, {"admin-key": ""}, {"admin-key": "0123456789abcdef"}):
        status, text = http_request(server, method, path, b"{}", headers)
        assert (status, "restricted" in text) == (403, True)


def test_administration_is_closed_over_grpc(
    stub: service_pb2_grpc.GRPCInferenceServiceStub,
) -> None:
    calls = [
        (stub.RepositoryIndex, service_pb2.RepositoryIndexRequest()),
        (stub.RepositoryModelLoad, service_pb2.RepositoryModelLoadRequest(model_name="engine")),
        (stub.RepositoryModelUnload, service_pb2.RepositoryModelUnloadRequest(model_name="engine")),
        (stub.LogSettings, service_pb2.LogSettingsRequest()),
        (stub.TraceSetting, service_pb2.TraceSettingRequest()),
        (stub.SystemSharedMemoryStatus, service_pb2.SystemSharedMemoryStatusRequest()),
        (stub.SystemSharedMemoryRegister, service_pb2.SystemSharedMemoryRegisterRequest(name="x")),
        (stub.CudaSharedMemoryStatus, service_pb2.CudaSharedMemoryStatusRequest()),
    ]
    for call, message in calls:
        with pytest.raises(grpc.RpcError, match="This protocol is restricted"):
            call(message, timeout=30, metadata=[("triton-grpc-protocol-admin-key", "guess")])


def test_what_clients_read_stays_open(
    server: TritonServer, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    for path in ("/v2", "/v2/models/ensemble", "/v2/models/ensemble/config", "/v2/models/stats"):
        assert http_request(server, "GET", path, None, {})[0] == 200
    assert stub.ModelStatistics(service_pb2.ModelStatisticsRequest(), timeout=30).model_stats


SAMPLING = {"sampling_parameters": '{"ignore_eos": true, "max_tokens": 300}', "stream": True}


def detokenizer_request(data: bytes) -> Request:
    return request("detokenizer", ("detokenizer_input", "UINT8", [1, len(data)], data))


def check_is_refused(stub: service_pb2_grpc.GRPCInferenceServiceStub, data: bytes) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(detokenizer_request(data), timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert OURS in caught.value.details()


def test_the_detokenizer_takes_only_what_the_engine_sealed(
    caller: Caller, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    """Whoever poses as the tokenizer sees the engine's messages, and can make no other of them."""
    alone = "".join(r["text_output"][0] for r in caller.stream(text_input="Hello", **SAMPLING))
    victim = caller.stream(text_input="Hello", **SAMPLING)
    text = next(victim)["text_output"][0]
    posing = caller.stream("engine", input_ids=[5], response_options=[0x90], **SAMPLING)
    sealed = bytes(next(posing)["detokenizer_input"])
    header, payload = sealed[:40], sealed[40:]
    message = msgspec.msgpack.decode(payload, type=DetokenizerInput)
    (answer,) = read_outputs(stub.ModelInfer(detokenizer_request(sealed), timeout=30)).values()
    assert len(answer) == 1
    check_is_refused(stub, payload)
    for uid in range(max(0, message.uid - 50), message.uid):
        forged = msgspec.structs.replace(message, uid=uid, check_cancelled=True)
        check_is_refused(stub, header + msgspec.msgpack.encode(forged))
    assert len(list(posing)) > 0
    assert text + "".join(r["text_output"][0] for r in victim) == alone


def test_a_huge_message_to_the_detokenizer_stalls_nobody(
    caller: Caller, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    posing = caller.stream("engine", input_ids=[5], response_options=[0x90], **SAMPLING)
    header = bytes(next(posing)["detokenizer_input"])[:40]
    posing.close()
    chunk = msgspec.msgpack.encode(Chunk(0, [], [65] * 1_000_000, None))
    start = msgspec.msgpack.encode(1) + b"\xdc" + struct.pack(">H", 100)
    forged = header + b"\x92" + start + chunk * 100
    assert len(forged) > 100_000_000
    message = detokenizer_request(forged)
    stream = caller.stream(text_input="Hello", **SAMPLING)
    next(stream)
    with ThreadPoolExecutor() as pool:
        refused = pool.submit(lambda: list(stub.ModelStreamInfer(iter([message]), timeout=60)))
        gaps, before = [], time.monotonic()
        for _ in stream:
            gaps.append(time.monotonic() - before)
            before += gaps[-1]
        assert OURS in refused.result()[0].error_message
    assert max(gaps) < 5  # decoded, it would take tens of seconds
