"""A server to be measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from subprocess import Popen
from types import TracebackType
from typing import Self

from client.bench.load.record import Target


class Server(ABC):
    """A server to be measured: a context manager, inside whose block its processes run.

    Attributes:
        name: shown in tables.
        launched: start time by `time.monotonic`; set inside the block.
        metrics_url: where its metrics are read; empty: nowhere. Set inside the block.
        worker: the load generator that it runs in, if it does. Set inside the block.
    """

    name: str
    launched: float
    metrics_url: str = ""
    worker: Popen[bytes] | None = None

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """The processes that all others of the server descend from; none: it is not ours."""

    @property
    @abstractmethod
    def target(self) -> Target:
        """Where requests go, when it is ready."""

    @abstractmethod
    async def wait_until_ready(self) -> None:
        """Return when requests can be sent.

        Raises:
            TridentClientError: the server will not become ready.
        """

    @abstractmethod
    def require_alive(self) -> None:
        """Raise `BenchError` with its last words if its process has ended."""

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
