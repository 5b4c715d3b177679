"""Forged messages to the detokenizer are refused, and harm nobody."""

from __future__ import annotations

import struct
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import msgspec
import pytest
from tritonclient.grpc import service_pb2_grpc

from engine.protocol.messages import Chunk, DetokenizerInput
from engine.protocol.token_ids import pack_token_ids
from tests.server.caller import Caller, read_outputs
from tests.server.raw_requests import NOT_SEALED, Request, request

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("quiet_log")]

SAMPLING = {"sampling_parameters": '{"ignore_eos": true, "max_tokens": 300}', "stream": True}


def detokenizer_request(data: bytes) -> Request:
    return request("detokenizer", ("detokenizer_input", "UINT8", [1, len(data)], data))


def check_is_refused(stub: service_pb2_grpc.GRPCInferenceServiceStub, data: bytes) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(detokenizer_request(data), timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert NOT_SEALED in caught.value.details()


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
    chunk = msgspec.msgpack.encode(Chunk(0, b"", pack_token_ids([65] * 1_000_000)))
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
        assert NOT_SEALED in refused.result()[0].error_message
    assert max(gaps) < 5  # decoded, it would take tens of seconds
