"""Valid requests, from which the malformed ones are made."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
from tritonclient.grpc import service_pb2

from engine.protocol.messages import Chunk, DetokenizerInput
from engine.protocol.token_ids import pack_token_ids

UNARY = "tensorrt_llm_bls"
MODELS = ("ensemble", "engine", "tokenizer", "detokenizer", UNARY)
TEXT_MODELS = ("ensemble", "tokenizer", UNARY)

# Optional inputs of the ensemble, each with a valid value.
OPTIONAL: Mapping[str, tuple[str, Any]] = {
    "stream": ("BOOL", True),
    "exclude_input_in_output": ("BOOL", True),
    "temperature": ("FP32", 0.7),
    "top_k": ("INT32", 5),
    "top_p": ("FP32", 0.9),
    "min_p": ("FP32", 0.1),
    "repetition_penalty": ("FP32", 1.1),
    "presence_penalty": ("FP32", 0.5),
    "frequency_penalty": ("FP32", -0.5),
    "min_tokens": ("INT32", 1),
    "seed": ("UINT64", 7),
    "num_return_sequences": ("INT32", 2),
    "stop_words": ("BYTES", ["zz", "qq"]),
    "bad_words": ("BYTES", ["xx"]),
    "end_id": ("INT32", 3),
    "return_log_probs": ("BOOL", True),
    "return_finish_reason": ("BOOL", True),
    "return_num_output_tokens": ("BOOL", True),
    "return_sections": ("BOOL", True),
    "priority": ("INT32", 1),
    "timeout": ("UINT64", 20_000_000),
    "sampling_parameters": ("BYTES", '{"logprobs": 2, "ignore_eos": true}'),
}
_FORMATS = {"BOOL": "?", "INT32": "<i", "INT64": "<q", "UINT64": "<Q", "UINT8": "<B", "FP32": "<f"}
_MAX_TOKENS = 8


def request(rng: random.Random, model: str | None = None) -> service_pb2.ModelInferRequest:
    """Return a valid request to one of the models; the detokenizer refuses all but the engine's."""
    model = model or rng.choices(MODELS, (5, 2, 2, 1, 2))[0]
    message = service_pb2.ModelInferRequest(model_name=model, id=f"fuzz-{rng.randrange(1000)}")
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    if model == "detokenizer":
        add(message, "detokenizer_input", "UINT8", list(detokenizer_input(rng)))
        return message
    if model == "engine":
        add(message, "input_ids", "INT32", [rng.randrange(300) for _ in range(rng.randint(1, 20))])
        add(message, "sampling_parameters", "BYTES", json.dumps({"max_tokens": _MAX_TOKENS}))
        add(message, "stream", "BOOL", rng.random() < 0.5)
        return message
    if rng.random() < 0.3:
        chat = [{"role": "user", "content": f"Question {rng.randrange(100)}?"}]
        add(message, "messages", "BYTES", json.dumps(chat))
    else:
        add(message, "text_input", "BYTES", f"Some text 你好 {rng.randrange(100)}")
    add(message, "max_tokens", "INT32", rng.randint(1, _MAX_TOKENS))
    for name in rng.sample(sorted(OPTIONAL), rng.randint(0, 5)):
        if (name, model) != ("stream", UNARY):  # which answers once
            add(message, name, *OPTIONAL[name])
    return message


def detokenizer_input(rng: random.Random) -> bytes:
    """Return a message as the engine sends it to the detokenizer, without its authentication."""
    ids = [rng.randrange(300) for _ in range(rng.randint(1, 8))]
    chunk = Chunk(0, pack_token_ids(ids[:2]), pack_token_ids(ids))
    return msgspec.msgpack.encode(DetokenizerInput(uid=1, chunks=[chunk]))


def body(rng: random.Random, model: str | None = None) -> dict[str, Any]:
    """Return a valid JSON body for `generate` and `generate_stream`."""
    if (model or rng.choice(("ensemble", "engine"))) == "engine":
        return {"input_ids": [rng.randrange(300) for _ in range(5)], "stream": False}
    optional = {name: OPTIONAL[name][1] for name in rng.sample(sorted(OPTIONAL), rng.randint(0, 4))}
    return {"text_input": "Some text", "max_tokens": _MAX_TOKENS, **optional}


def add(message: service_pb2.ModelInferRequest, name: str, datatype: str, value: Any) -> None:
    """Add an input with a batch dimension."""
    values = value if isinstance(value, list) else [value]
    message.inputs.add(name=name, datatype=datatype, shape=[1, len(values)])
    message.raw_input_contents.append(raw(datatype, values))


def raw(datatype: str, values: list[Any]) -> bytes:
    """Return `values` as KServe's binary tensor data."""
    if datatype == "BYTES":
        data = [v if isinstance(v, bytes) else v.encode("utf-8", "surrogatepass") for v in values]
        return b"".join(struct.pack("<I", len(v)) + v for v in data)
    return b"".join(struct.pack(_FORMATS[datatype], v) for v in values)


def replace(
    message: service_pb2.ModelInferRequest, name: str, datatype: str, value: Any
) -> service_pb2.ModelInferRequest:
    """Set input `name`, which may exist already."""
    remove(message, name)
    add(message, name, datatype, value)
    return message


def remove(message: service_pb2.ModelInferRequest, name: str) -> None:
    """Remove input `name`, if present."""
    for index, tensor in enumerate(message.inputs):
        if tensor.name == name:
            del message.inputs[index]
            del message.raw_input_contents[index]
            return
