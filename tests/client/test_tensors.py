"""Output tensors are read as tritonclient reads them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import serialize_byte_tensor

from client.response import read_tensors

DTYPES = {
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "FP32": "<f4",
    "BOOL": "?",
}


def response(name: str, datatype: str, raw: bytes, size: int) -> service_pb2.ModelInferResponse:
    made = service_pb2.ModelInferResponse()
    made.outputs.add(name=name, datatype=datatype, shape=[1, size])
    made.raw_output_contents.append(raw)
    return made


@given(st.sampled_from(sorted(DTYPES)), st.binary(max_size=64))
def test_numbers(datatype: str, data: bytes) -> None:
    width = np.dtype(DTYPES[datatype]).itemsize
    raw = data[: len(data) // width * width]
    if datatype == "BOOL":
        raw = bytes(byte & 1 for byte in raw)
    made = response("x", datatype, raw, len(raw) // width)
    expected: Any = InferResult(made).as_numpy("x")
    np.testing.assert_array_equal(read_tensors(made)["x"], expected.reshape(-1))


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_strings(values: list[bytes]) -> None:
    raw = b"".join(struct.pack("<I", len(value)) + value for value in values)
    if values:
        assert raw == serialize_byte_tensor(np.array(values, dtype=object)).item()
    assert read_tensors(response("x", "BYTES", raw, len(values))) == {"x": values}


def test_what_is_cut_off_is_an_error_and_unknown_types_are_left_out() -> None:
    for datatype, raw in (("BYTES", b"\5\0\0\0ab"), ("BYTES", b"\5\0"), ("INT32", b"abc")):
        with pytest.raises((ValueError, struct.error)):
            read_tensors(response("x", datatype, raw, 1))
    assert read_tensors(response("x", "FP64", b"12345678", 1)) == {}
