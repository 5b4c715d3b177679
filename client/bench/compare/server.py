"""The load generator's interface to a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from client.bench.compare.answer import Answer
from client.bench.workload import Prompt


class Connection(ABC):
    """One connection to a server, for one request at a time."""

    @abstractmethod
    async def ask(self, prompt: Prompt, output_tokens: int) -> Answer:
        """Stream the greedy completion of `prompt`, of exactly `output_tokens` tokens.

        Raises:
            TridentClientError: the request failed.
        """


class Server(ABC):
    """A server to be measured: a context manager, inside whose block its processes run.

    Attributes:
        name: shown in tables.
        launched: start time by `time.perf_counter`; set inside the block.
    """

    name: str
    launched: float

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process that all others of the server descend from."""

    @abstractmethod
    async def wait_until_ready(self) -> None:
        """Return when requests can be sent.

        Raises:
            TridentClientError: the server will not become ready.
        """

    @abstractmethod
    def connect(self) -> AbstractAsyncContextManager[Connection]:
        """Return a dedicated connection to the server, open inside the block."""

    @abstractmethod
    def __enter__(self) -> Self:
        """Start the server.

        Raises:
            TridentClientError: it cannot be started.
        """

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all its processes."""
