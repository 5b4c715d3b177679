"""Valid requests with invalid tensor descriptions, which Triton itself must detect."""

from __future__ import annotations

import random

from tritonclient.grpc.service_pb2 import ModelInferRequest as Message

from tests.server.resilience.fuzzing import valid

_DATATYPES = ("BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP16", "FP32", "FP64", "BYTES", "BF16")


def wrong_datatype(rng: random.Random) -> Message:
    message = valid.request(rng)
    tensor = rng.choice(message.inputs)
    others = [t for t in (*_DATATYPES, "", "FLOAT", "bytes", "\x00") if t != tensor.datatype]
    tensor.datatype = rng.choice(others)
    return message


def wrong_shape(rng: random.Random) -> Message:
    message = valid.request(rng)
    tensor = rng.choice(message.inputs)
    shapes = [[], [0], [-1], [2], [2, 1], [1, 1, 1], [1, 0], [0, 0], [1, -1], [1, 2**31], [7, 9]]
    tensor.shape[:] = rng.choice([s for s in [*shapes, [1] * 1000] if s != list(tensor.shape)])
    return message


def overflowing_shape(rng: random.Random) -> Message:
    """A product of dimensions that overflows 64 bits, sometimes to the right number of elements."""
    message = valid.request(rng)
    shapes = [[2**62, 2**62], [2**63 - 1], [1, 2**63 - 1], [-(2**63), 1], [2**32, 2**32]]
    rng.choice(message.inputs).shape[:] = rng.choice(shapes)
    return message


def wrong_length(rng: random.Random) -> Message:
    message = valid.request(rng)
    index = rng.randrange(len(message.raw_input_contents))
    data = message.raw_input_contents[index]
    cut, longer = data[: rng.randrange(len(data))], data + rng.randbytes(rng.randint(1, 64))
    message.raw_input_contents[index] = rng.choice([cut, longer, data * 1000])
    return message


def wrong_string_length(rng: random.Random) -> Message:
    message = valid.request(rng, rng.choice(valid.TEXT_MODELS))
    data = message.raw_input_contents[0]
    prefix = rng.choice([0, 1, len(data), 2**31 - 1, 2**31, 2**32 - 1])
    message.raw_input_contents[0] = prefix.to_bytes(4, "little") + data[4:]
    return message


def missing_contents(rng: random.Random) -> Message:
    message = valid.request(rng)
    del message.raw_input_contents[rng.randrange(len(message.raw_input_contents))]
    return message


def surplus_contents(rng: random.Random) -> Message:
    message = valid.request(rng)
    message.raw_input_contents.append(rng.randbytes(4))
    return message


def both_contents(rng: random.Random) -> Message:
    message = valid.request(rng)
    rng.choice(message.inputs).contents.int_contents.extend([1, 2, 3])
    return message


def missing_input(rng: random.Random) -> Message:
    message = valid.request(rng)
    for name in ("text_input", "messages", "input_ids", "detokenizer_input"):
        valid.remove(message, name)
    return message


def duplicate_input(rng: random.Random) -> Message:
    message = valid.request(rng)
    index = rng.randrange(len(message.inputs))
    message.inputs.append(message.inputs[index])
    message.raw_input_contents.append(message.raw_input_contents[index])
    return message


def unknown_input(rng: random.Random) -> Message:
    message = valid.request(rng)
    name = rng.choice(["bogus", "", "TEXT_INPUT", "x" * 10_000, "../../x", "text_input\x00", "%n"])
    valid.add(message, name, "INT32", 1)
    return message


def unknown_output(rng: random.Random) -> Message:
    message = valid.request(rng)
    message.outputs.add(name=rng.choice(["bogus", "", "text_output ", "%s%s%n", "o" * 10_000]))
    return message


def shared_memory(rng: random.Random) -> Message:
    message = valid.request(rng)
    message.outputs.add(name="text_output" if message.model_name == "ensemble" else "token_ids")
    tensor = rng.choice([message.inputs[0], message.outputs[0]])
    region = rng.choice(["bogus", "", "/etc/passwd", "../x"])
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_byte_size"].int64_param = rng.choice([0, 1, -1, 2**62])
    if rng.random() < 0.5:
        tensor.parameters["shared_memory_offset"].int64_param = rng.choice([-1, 2**62])
    del message.raw_input_contents[0]
    return message
