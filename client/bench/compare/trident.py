"""Trident as a server to be measured: the whole ensemble over gRPC, streaming."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from client import AsyncTridentClient
from client.bench.compare.answer import Answer
from client.bench.compare.server import Connection, Server
from client.bench.compare.workload import greedy
from client.bench.workload import Prompt
from client.serve import TritonServer


class GrpcConnection(Connection):
    """A gRPC connection to an ensemble."""

    def __init__(self, client: AsyncTridentClient) -> None:
        self._client = client

    async def ask(self, prompt: Prompt, output_tokens: int) -> Answer:
        """As `Connection.ask`."""
        answer = Answer(time.perf_counter())
        async with aclosing(self._client.stream(prompt.text, **greedy(output_tokens))) as chunks:
            async for chunk in chunks:
                if chunk.num_output_tokens:
                    answer.arrivals.append(time.perf_counter())
                    answer.num_tokens += chunk.num_output_tokens
                if chunk.num_input_tokens:
                    answer.num_prompt_tokens = chunk.num_input_tokens
        return answer


class Trident(Server):
    """A tritonserver on `model`; other settings come from `engine.json` and `TRIDENT_*`."""

    name = "trident"

    def __init__(self, model: Path) -> None:
        self._model = model
        self._server: TritonServer | None = None

    @property
    def pid(self) -> int:
        """As `Server.pid`."""
        assert self._server is not None
        return self._server.pid

    async def wait_until_ready(self) -> None:
        """Return: `__enter__` has waited."""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """As `Server.connect`."""
        assert self._server is not None
        # A request that is tried again would be a slow one: here it is to be an error.
        async with AsyncTridentClient(self._server.grpc_url, retry=None) as client:
            yield GrpcConnection(client)

    def __enter__(self) -> Self:
        self._server = TritonServer({"model": str(self._model)}, ports=0)
        self.launched = time.perf_counter()
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.stop()
        self._server = None
