"""The counters of a request, which are in an array so that a step changes those of all rows."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

NUM_COUNTERS = 4  # in `Request.counters`


class _Counted(Protocol):
    counters: NDArray[np.int32]


class Counter:
    """An attribute of `Request` that is one of its `counters`."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, request: _Counted, owner: type[_Counted]) -> int:
        return int(request.counters[self._index])

    def __set__(self, request: _Counted, value: int) -> None:
        request.counters[self._index] = value
