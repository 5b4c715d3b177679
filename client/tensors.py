"""Reads output tensors: with tritonclient's NumPy arrays, a chunk takes three times as long."""

from __future__ import annotations

import struct
from typing import Any

from tritonclient.grpc import service_pb2

_NUMBERS = {
    name: struct.Struct(f"<{code}")
    for name, code in (
        ("INT32", "i"),
        ("INT64", "q"),
        ("UINT32", "I"),
        ("UINT64", "Q"),
        ("FP32", "f"),
        ("BOOL", "?"),
    )
}
_LENGTH = struct.Struct("<I")


def read_tensors(response: service_pb2.ModelInferResponse) -> dict[str, list[Any]]:
    """Return the values of each output by its name, strings as bytes; other types are left out.

    Raises:
        ValueError, struct.error: the content is not what the response says of it.
    """
    tensors: dict[str, list[Any]] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        datatype = output.datatype
        if datatype == "BYTES":
            tensors[output.name] = _strings(raw)
        elif number := _NUMBERS.get(datatype):
            tensors[output.name] = [value for (value,) in number.iter_unpack(raw)]
    return tensors


def _strings(raw: bytes) -> list[bytes]:
    strings, place = [], 0
    while place < len(raw):
        (length,) = _LENGTH.unpack_from(raw, place)
        place += _LENGTH.size
        if place + length > len(raw):
            raise ValueError(f"a string of {length} bytes where {len(raw) - place} are left")
        strings.append(raw[place : place + length])
        place += length
    return strings
