"""Reading the input tensors of one request, whatever shape a client gave them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import RequestError
from engine.protocol.token_ids import TokenIds, token_array
from engine.validation.limits import check_size

Tensors = Mapping[str, NDArray[Any]]

_KINDS = {"string": "OSU", "integer": "iu", "number": "fiu", "boolean": "b"}


class InputReader:
    """Typed access to tensors by name; absent ones read as None (lists: as empty).

    A scalar has the shape [1], or [1, 1] with the batch dimension of TensorRT-LLM's clients; a list
    [N] or [1, N], with N up to `max_size`. Each method raises `RequestError` naming the input and
    what is allowed.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def string(self, name: str) -> str | None:
        """Return one string; it must be valid UTF-8."""
        value = self._scalar(name, "string")
        return None if value is None else _text(name, value)

    def integer(self, name: str) -> int | None:
        """Return one integer."""
        value = self._scalar(name, "integer")
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        """Return one number."""
        value = self._scalar(name, "number")
        return None if value is None else float(value)

    def boolean(self, name: str) -> bool | None:
        """Return one bool."""
        value = self._scalar(name, "boolean")
        return None if value is None else bool(value)

    def size(self, name: str) -> int:
        """Return the length of a list of integers."""
        return len(self._list(name, "integer"))

    def strings(self, name: str, max_size: int) -> list[str]:
        """Return a list of strings, without empty ones: other servers' clients send `[[""]]`."""
        values = (_text(name, value) for value in self._list(name, "string", max_size))
        return [value for value in values if value]

    def numbers(self, name: str, max_size: int) -> list[float]:
        """Return a list of finite numbers."""
        values = self._list(name, "number", max_size)
        if len(values) and not np.isfinite(values.astype(np.float64)).all():
            raise RequestError("must hold finite numbers only", param=name)
        return [float(value) for value in values]

    def token_ids(self, name: str, max_size: int) -> TokenIds:
        """Return a list of token ids; each must fit into 32 bits."""
        return token_array(name, self._list(name, "integer", max_size))

    def octets(self, name: str, max_size: int) -> bytes | None:
        """Return the bytes of a list of U8."""
        if name not in self._tensors:
            return None
        return bytes(self._list(name, "integer", max_size).astype(np.uint8).tobytes())

    def _scalar(self, name: str, kind: str) -> Any:
        if name not in self._tensors:
            return None
        array = self._tensors[name]
        _check_kind(name, array, kind)
        if array.shape not in ((1,), (1, 1)):
            shown = list(array.shape)
            raise RequestError(f"must have the shape [1] or [1, 1] (got {shown})", param=name)
        return array.reshape(-1)[0]

    def _list(self, name: str, kind: str, max_size: int | None = None) -> NDArray[Any]:
        if name not in self._tensors:
            return np.empty(0, dtype=object)
        array = self._tensors[name]
        _check_kind(name, array, kind)
        if array.ndim == 2 and array.shape[0] == 1:
            array = array[0]
        if array.ndim != 1:
            shown = list(self._tensors[name].shape)
            raise RequestError(f"must have the shape [N] or [1, N] (got {shown})", param=name)
        if max_size is not None:
            check_size(name, len(array), max_size, "elements")
        return array


def _check_kind(name: str, array: NDArray[Any], kind: str) -> None:
    if array.dtype.kind not in _KINDS[kind]:
        raise RequestError(f"must be of type {kind} (got {array.dtype})", param=name)


def _text(name: str, value: Any) -> str:
    """Return an element of a BYTES tensor as text."""
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    if not isinstance(value, bytes):
        raise RequestError(f"must be of type string (got {type(value).__name__})", param=name)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"is not valid UTF-8 (at byte {error.start})", param=name) from None
