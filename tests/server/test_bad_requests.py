"""Malformed requests to every stage: the errors say what is wrong, and nothing else."""

from __future__ import annotations

import http.client
import json
import struct
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from engine.launch.server import TritonServer
from tests.server.raw_requests import NOT_SEALED, Request, http_request, request

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("quiet_log")]

JUNK = bytes(range(128, 192))
ID = struct.pack("<i", 1)
GENERATE = "/v2/models/ensemble/generate"


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
BAD_REQUESTS = {
    "detokenizer-junk": (
        request("detokenizer", ("detokenizer_input", "UINT8", [1, 64], JUNK)),
        NOT_SEALED,
    ),
    "detokenizer-empty": (
        request("detokenizer", ("detokenizer_input", "UINT8", [1, 0], b"")),
        NOT_SEALED,
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
        "response_options: is set by the tokenizer stage",
    ),
    "engine-ids": (
        request("engine", ("input_ids", "INT32", [1, 2], b"\xff" * 8)),
        "input_ids[0]: token id -1 is outside the vocabulary",
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


def tensor(**fields: Any) -> bytes:
    return json.dumps({"inputs": [{"name": "detokenizer_input", **fields}]}).encode()


INFER = "/v2/models/detokenizer/infer"
BAD_HTTP: dict[str, tuple[str, str, bytes | None, dict[str, str]]] = {
    "no-json": ("POST", GENERATE, b"{", {}),
    "no-object": ("POST", GENERATE, b"[]", {}),
    "nothing": ("POST", GENERATE, b"", {}),
    **{
        f"deep{target.removeprefix('/v2/models')}-{depth}": ("POST", target, begin * depth, {})
        for target in (GENERATE, "/v2/models/tensorrt_llm_bls/infer")
        for begin, depth in ((b"[", 200_000), (b'{"inputs":', 100_000), (b"[", 1_000_000))
    },
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
