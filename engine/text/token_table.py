"""TokenTable: figures of tokens, each computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_V = TypeVar("_V")


class TokenTable(dict[int, _V]):
    """A figure of each token, computed when it is first asked for. Threads may share it."""

    def __init__(self, compute: Callable[[int], _V]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> _V:
        value = self[token_id] = self._compute(token_id)
        return value
