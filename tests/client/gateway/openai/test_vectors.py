"""The JSON of embeddings."""

from __future__ import annotations

import base64

import msgspec
import numpy as np
import pytest

from client.gateway.openai.serving_embeddings import Vector, encoded


def unit_vector(size: int) -> Vector:
    values = np.random.default_rng(size).standard_normal(size)
    made: Vector = (values / np.linalg.norm(values)).astype(np.float32)
    return made


@pytest.mark.parametrize(
    "values",
    [
        *(unit_vector(size) for size in (1, 2, 64, 4096)),
        np.array([0, -0.0, 1, -1, 0.5, 0.1, 1e-4, 1.2345678e-9, 1e-30, 1e-45], np.float32),
    ],
)
def test_numbers_are_read_as_the_same_float32(values: Vector) -> None:
    read = msgspec.json.decode(bytes(encoded(values, "float")), type=list[float])
    assert np.array(read, np.float32).tobytes() == values.tobytes()


def test_numbers_have_no_more_digits_than_float32() -> None:
    assert bytes(encoded(np.array([0.1, -0.0123, 0.12345678], np.float32), "float")) == (
        b"[0.1,-0.0123,0.12345678]"
    )
    values = unit_vector(1024)
    shortest = ",".join(str(value) for value in values)
    assert len(bytes(encoded(values, "float"))) <= 1.01 * len(shortest)


def test_base64_is_that_of_the_bytes() -> None:
    values = unit_vector(64)
    text = msgspec.json.decode(bytes(encoded(values, "base64")), type=str)
    assert base64.b64decode(text) == values.astype("<f4").tobytes()
