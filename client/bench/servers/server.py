"""A server to be measured."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from client.bench.errors import BenchError
from client.bench.load.record import Target
from client.bench.load.scrape import DIRECT
from engine.launch.worker_process import WorkerProcess

_TIMEOUT_S = 30.0


def first_model(url: str, key: str = "") -> str:
    """Return the first model that OpenAI's API at `url` lists.

    Raises:
        OSError, ValueError, LookupError, TypeError: it lists none.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    asked = urllib.request.Request(f"{url}/models", headers=headers)
    with DIRECT.open(asked, timeout=_TIMEOUT_S) as response:
        return str(json.load(response)["data"][0]["id"])


@dataclass
class Running:
    """A server that takes requests.

    Attributes:
        target: where they go.
        launched: start time by `time.monotonic`.
        pids: the processes that all others of the server descend from; none: it is not ours.
        metrics_url: where its metrics are read; empty: nowhere.
        worker: the load generator that it runs in, if it does.
        end: returns how its process has ended, with its last log lines; "" if it has not, as far as
            known.
    """

    target: Target
    launched: float
    pids: Sequence[int] = ()
    metrics_url: str = ""
    worker: WorkerProcess | None = None
    end: Callable[[], str] = str

    def require_alive(self) -> None:
        """Raise `BenchError` if its process has ended."""
        if ended := self.end():
            raise BenchError(ended)


@dataclass(frozen=True)
class Server:
    """A server to be measured.

    Attributes:
        name: shown in tables.
        start: starts it; inside the block it takes requests, and behind it nothing of it is left.
            Raises TridentClientError or TridentError: it does not become ready.
    """

    name: str
    start: Callable[[], AbstractContextManager[Running]]
