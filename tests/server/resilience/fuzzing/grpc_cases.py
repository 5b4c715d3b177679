"""Malformed gRPC requests: each function makes a valid one invalid in one way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from tritonclient.grpc.service_pb2 import ModelInferRequest as Message

from tests.server.resilience.fuzzing import tensors, valid, values
from tests.server.resilience.fuzzing.case import Case

Spoil = Callable[[random.Random], Message]


def _invalid_utf8(rng: random.Random) -> Message:
    message = valid.request(rng, rng.choice(valid.TEXT_MODELS))
    bad = [b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\xaf", b"ok\x80", b"\xf4\x90\x80\x80"]
    name = rng.choice(["text_input", "sampling_parameters", "stop_words", "bad_words"])
    valid.remove(message, "messages")
    return valid.replace(message, name, "BYTES", rng.choice(bad))


def _not_finite(rng: random.Random) -> Message:
    names = ["temperature", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
    message = valid.request(rng, rng.choice(valid.TEXT_MODELS))
    valid.remove(message, "sampling_parameters")
    value = rng.choice([float("nan"), float("inf"), float("-inf")])
    return valid.replace(message, rng.choice(names), "FP32", value)


def _out_of_range(rng: random.Random) -> Message:
    message = valid.request(rng, rng.choice(valid.TEXT_MODELS))
    valid.remove(message, "sampling_parameters")
    name, datatype, value = rng.choice(values.OUT_OF_RANGE)
    return valid.replace(message, name, datatype, value)


def _sampling_json(rng: random.Random) -> Message:
    message = valid.request(rng, rng.choice(("ensemble", "tokenizer", "engine")))
    return valid.replace(message, "sampling_parameters", "BYTES", values.bad_sampling(rng))


def _messages_json(rng: random.Random) -> Message:
    message = valid.request(rng, rng.choice(valid.TEXT_MODELS))
    valid.remove(message, "text_input")
    return valid.replace(message, "messages", "BYTES", values.bad_messages(rng))


def _too_long(rng: random.Random) -> Message:
    message = valid.request(rng, rng.choice(valid.TEXT_MODELS))
    valid.remove(message, "messages")
    text = rng.choice("a~é你😀 ") * rng.choice([5000, 100_000, 2_000_000])
    return valid.replace(message, "text_input", "BYTES", text)


def _model(rng: random.Random) -> Message:
    message = valid.request(rng)
    if rng.random() < 0.5:
        message.model_name = rng.choice(values.MODEL_NAMES)
    else:
        message.model_version = rng.choice(values.MODEL_VERSIONS)
    return message


def _unknown_parameter(rng: random.Random) -> Message:
    message = valid.request(rng, rng.choice(("ensemble", "tokenizer", "engine")))
    name = rng.choice(["bogus", "", " ", "x" * 10_000, "Max_Tokens", "__class__", '"', "\n"])
    parameter = message.parameters[name]
    match rng.randrange(3):
        case 0:
            parameter.string_param = rng.choice(["", "x", "\x00", "é" * 1000])
        case 1:
            parameter.int64_param = rng.choice([0, -1, 2**63 - 1, -(2**63)])
        case _:
            parameter.bool_param = True
    return message


def _engine_ids(rng: random.Random) -> Message:
    message = valid.request(rng, "engine")
    bad = [[2**31 - 1], [-1], [-(2**31)], [1, 2, 10**6], [1] * 5000]
    return valid.replace(message, "input_ids", "INT32", rng.choice(bad))


def _engine_options(rng: random.Random) -> Message:
    message = valid.request(rng, "engine")
    data = rng.choice([b"\xc1", b"\x90" * 5, b"\xdd\xff\xff\xff\xff", b"\x91" * 9000, b"\x01\x02"])
    return valid.replace(message, "response_options", "UINT8", list(data))


def _detokenizer_garbage(rng: random.Random) -> Message:
    message = valid.request(rng, "detokenizer")
    data = rng.choice([b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 9000, b"\x80", b"\xff" * 50])
    return valid.replace(message, "detokenizer_input", "UINT8", list(data))


def _detokenizer_forged(rng: random.Random) -> Message:
    message = valid.request(rng, "detokenizer")
    data = list(values.forged_detokenizer_input(rng))
    return valid.replace(message, "detokenizer_input", "UINT8", data)


def _request_id(rng: random.Random) -> Message:
    message = valid.request(rng)
    message.id = rng.choice(
        ["", "\n", "\x00", "x" * 100_000, '"}{', "%n%s", "你好", "../..", "same"]
    )
    return message


def _reserved_parameter(rng: random.Random) -> Message:
    message = valid.request(rng)
    name = rng.choice(["sequence_id", "sequence_start", "sequence_end", "priority", "timeout"])
    parameter = message.parameters[name]
    if rng.random() < 0.5:
        parameter.string_param = rng.choice(["", "x", "1", "\x00"])
    else:
        parameter.int64_param = rng.choice([0, 1, -1, 2**63 - 1, -(2**63)])
    return message


def _classification(rng: random.Random) -> Message:
    """Request classes instead of values.

    Only for outputs that are not strings: for a string, release 24.10 divides by its element size
    of 0, so any client can crash the server with SIGFPE, whatever the models do.
    """
    model, name = rng.choice([("engine", "token_ids"), ("tokenizer", "input_ids")])
    message = valid.request(rng, model)
    output = message.outputs.add(name=name)
    output.parameters["classification"].int64_param = rng.choice([0, 1, 9, -1, 2**40, -(2**63)])
    return message


_MUST_FAIL: dict[str, Spoil] = {
    "wrong datatype": tensors.wrong_datatype,
    "wrong shape": tensors.wrong_shape,
    "wrong length of contents": tensors.wrong_length,
    "wrong length of a string": tensors.wrong_string_length,
    "missing contents": tensors.missing_contents,
    "both kinds of contents": tensors.both_contents,
    "missing input": tensors.missing_input,
    "unknown input": tensors.unknown_input,
    "unknown output": tensors.unknown_output,
    "invalid UTF-8": _invalid_utf8,
    "NaN and infinity": _not_finite,
    "number out of range": _out_of_range,
    "bad sampling_parameters": _sampling_json,
    "bad messages": _messages_json,
    "prompt too long": _too_long,
    "unknown model or version": _model,
    "unknown parameter": _unknown_parameter,
    "unknown shared memory": tensors.shared_memory,
    "engine: bad input_ids": _engine_ids,
    "engine: bad response_options": _engine_options,
    "detokenizer: garbage": _detokenizer_garbage,
    "detokenizer: forged": _detokenizer_forged,
}
_MAY_PASS: dict[str, Spoil] = {
    "overflowing shape": tensors.overflowing_shape,
    "surplus contents": tensors.surplus_contents,
    "duplicate input": tensors.duplicate_input,
    "odd request id": _request_id,
    "reserved parameter": _reserved_parameter,
    "classification": _classification,
}


def make(rng: random.Random) -> Case:
    """Return a malformed gRPC request."""
    if rng.random() < 0.2:
        return _mutated(rng)
    if rng.random() < 0.05:
        return _headers(rng)
    kinds = {**_MUST_FAIL, **_MAY_PASS}
    kind = rng.choice(sorted(kinds))
    message = kinds[kind](rng)
    return Case(
        f"grpc: {kind}",
        _transport(rng, message),
        message.SerializeToString(),
        must_fail=kind in _MUST_FAIL,
    )


def _transport(rng: random.Random, message: Message) -> str:
    """Return mostly the call that fits the model: decoupled models need a stream."""
    decoupled = message.model_name in ("ensemble", "engine")
    suits, other = ("stream", "unary") if decoupled else ("unary", "stream")
    return suits if rng.random() < 0.9 else other


def _mutated(rng: random.Random) -> Case:
    """Change bytes of a valid message, mostly breaking its wire format."""
    message = valid.request(rng)
    transport = _transport(rng, message)
    payload = values.mutate(rng, message.SerializeToString())
    return Case("grpc: mutated bytes", transport, payload, must_fail=False, may_close=True)


def _headers(rng: random.Random) -> Case:
    """Send unusual headers with a valid request.

    `triton_grpc_error` is left out: with it, release 24.10 aborts at the first error inside a
    stream (a failed assertion in its gRPC front end), whatever the models do.
    """
    message = valid.request(rng)
    names = ["traceparent", "triton-grpc-protocol-x", "x-odd", "tracestate", "content-language"]
    odd = ["", "00-zz", "x" * 4000, "00-" + "f" * 32 + "-" + "f" * 16 + "-ff", json.dumps([1])]
    metadata = ((rng.choice(names), rng.choice(odd)), ("odd-bin", rng.randbytes(50)))
    payload = message.SerializeToString()
    transport = _transport(rng, message)
    return Case("grpc: odd headers", transport, payload, must_fail=False, metadata=metadata)
