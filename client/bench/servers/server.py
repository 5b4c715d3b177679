"""A server to be measured."""

from __future__ import annotations

import json
import urllib.request
from abc import ABC, abstractmethod
from subprocess import Popen
from typing import Self

from client.bench.load.record import Target

_TIMEOUT_S = 30.0


def first_model(url: str, key: str = "") -> str:
    """Return the first model that OpenAI's API at `url` lists.

    Raises:
        OSError, ValueError, LookupError, TypeError: it lists none.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    asked = urllib.request.Request(f"{url}/models", headers=headers)
    with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as response:
        return str(json.load(response)["data"][0]["id"])


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
    def pids(self) -> list[int]:
        """The processes that all others of the server descend from; none: it is not ours."""
        return []

    @property
    @abstractmethod
    def target(self) -> Target:
        """Where requests go, when it is ready."""

    def wait_until_ready(self) -> None:  # noqa: B027
        """Return when requests can be sent; at once where that is so inside the block.

        Raises:
            TridentClientError: the server will not become ready.
        """

    def require_alive(self) -> None:  # noqa: B027
        """Raise `BenchError` with its last words if its process has ended, where that is known."""

    @abstractmethod
    def __enter__(self) -> Self:
        """Start the server.

        Raises:
            TridentClientError: it cannot be started.
        """

    @abstractmethod
    def __exit__(self, *raised: object) -> None:
        """End all its processes."""
