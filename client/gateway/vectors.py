"""Embeddings as vectors: fewer dimensions of them, and their JSON."""

from __future__ import annotations

import base64
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]

_LEAST_NORM = 1e-12
_DECIMALS = (12, 10, 9, 8)  # enough, down to too few, for the values of a vector of length 1


def shortened(values: Vector, dimensions: int) -> Vector:
    """Return the first `dimensions`, of length 1, as Matryoshka embeddings are shortened."""
    if dimensions == len(values):
        return values
    wide = values[:dimensions].astype(np.float64)
    found: Vector = (wide / max(float(np.linalg.norm(wide)), _LEAST_NORM)).astype("f4")
    return found


def encoded(values: Vector, form: Literal["float", "base64"]) -> msgspec.Raw:
    """Return the JSON of numbers, or of their base64 as little-endian float32."""
    if form == "base64":
        return msgspec.Raw(b'"%b"' % base64.b64encode(values.astype("<f4").tobytes()))
    return msgspec.Raw(msgspec.json.encode(_brief(values).tolist()))


def _brief(values: Vector) -> NDArray[np.float64]:
    """Return them with the digits that float32 needs: as they are, JSON has 17 of each."""
    wide = values.astype(np.float64)
    found = wide
    for decimals in _DECIMALS:
        rounded = wide.round(decimals)
        found = np.where(rounded.astype(np.float32) == values, rounded, found)
    return found
