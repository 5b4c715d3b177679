"""Trident as a measured server: the whole ensemble over gRPC, streaming."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from client import AsyncTridentClient
from client.bench.compare.answer import Answer
from client.bench.compare.arguments import all_named
from client.bench.compare.server import Connection, Server
from client.bench.compare.workload import greedy
from client.bench.errors import BenchError
from client.bench.workload import Prompt
from engine.launch.server import TritonServer

TRIDENT = "trident"


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
    """A tritonserver serving the checkpoint in the folder `model`.

    Args:
        settings: override those of `engine.json` and the `TRIDENT_*` variables.

    Raises:
        ServerStartError: a setting is invalid.
    """

    def __init__(
        self, model: Path, settings: Mapping[str, str] = {}, *, name: str = TRIDENT
    ) -> None:
        self.name = name
        self._settings = {**settings, "model": str(model)}
        self._make_server()
        self._server: TritonServer | None = None

    @property
    def pid(self) -> int:
        """As `Server.pid`."""
        assert self._server is not None
        return self._server.pid

    async def wait_until_ready(self) -> None:
        """Return at once: `__enter__` has waited."""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """As `Server.connect`."""
        assert self._server is not None
        # No retries: a retried request would be measured as a slow one.
        async with AsyncTridentClient(
            self._server.grpc_url, model=self._server.model, retry=None
        ) as client:
            yield GrpcConnection(client)

    def __enter__(self) -> Self:
        self._server = self._make_server()
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

    def _make_server(self) -> TritonServer:
        return TritonServer(self._settings, ports=0)


def parse_variants(arguments: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parse `NAME=SETTING=VALUE ...` arguments into settings by name.

    Raises:
        BenchError: an argument has another form; names it.
    """
    variants: dict[str, dict[str, str]] = {}
    for name, words in all_named("--trident", arguments, taken=[TRIDENT]).items():
        variants[name] = all_named(f"--trident {name}", words.split())
        if "model" in variants[name]:
            raise BenchError(f"--trident {name}: all serve the same model")
    return variants
