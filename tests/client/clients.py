"""One interface for both clients, so that the same tests run with each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from client import AsyncTridentClient, Chunk, Completion, Health, Tokens, TridentClient


class Blocking:
    """An AsyncTridentClient with an event loop of its own, called like a TridentClient."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._runner = asyncio.Runner()

        async def connect() -> AsyncTridentClient:
            return AsyncTridentClient(*args, **options)

        try:
            self._client = self._runner.run(connect())
        except BaseException:
            self._runner.close()
            raise

    def generate(self, *args: Any, **options: Any) -> Completion:
        return self._runner.run(self._client.generate(*args, **options))

    def stream(self, *args: Any, **options: Any) -> Iterator[Chunk]:
        chunks = self._client.stream(*args, **options)

        async def following() -> Chunk | None:
            return await anext(chunks, None)

        try:
            while (chunk := self._runner.run(following())) is not None:
                yield chunk
        finally:
            self._runner.run(chunks.aclose())

    def tokenize(self, *args: Any, **options: Any) -> Tokens:
        return self._runner.run(self._client.tokenize(*args, **options))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._runner.run(self._client.detokenize(token_ids))

    def cancel(self, request_id: str) -> None:
        self._runner.run(self._client.cancel(request_id))

    def health(self, timeout: float | None = 5.0) -> Health:
        return self._runner.run(self._client.health(timeout))

    def is_ready(self, timeout: float | None = 5.0) -> bool:
        return self._runner.run(self._client.is_ready(timeout))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


AnyClient = TridentClient | Blocking
Connect = Callable[..., AnyClient]  # with the arguments of TridentClient
BOTH: list[type[AnyClient]] = [TridentClient, Blocking]
