"""What the load generator knows of a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from client.bench.compare.answer import Answer
from client.bench.workload import Prompt


class Connection(ABC):
    """One connection to a server, for one request after the other."""

    @abstractmethod
    async def ask(self, prompt: Prompt, output_tokens: int) -> Answer:
        """Stream the greedy completion of `prompt`, of exactly `output_tokens` tokens.

        Raises:
            TridentClientError: there is no such answer.
        """


class Server(ABC):
    """A server to be measured: a context manager, inside whose block its processes exist.

    Attributes:
        name: what tables call it.
        launched: when its start began, by `time.perf_counter`; set inside the block.
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
            TridentClientError: that will not be.
        """

    @abstractmethod
    def connect(self) -> AbstractAsyncContextManager[Connection]:
        """Return a connection of its own to the server, open inside the block."""

    @abstractmethod
    def __enter__(self) -> Self:
        """Start it.

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
