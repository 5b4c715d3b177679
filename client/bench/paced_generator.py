"""Generator: streams requests from a process of its own."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from client.bench.errors import BenchError
from client.bench.paced_figures import Arrivals

_PER_CONNECTION = 128  # streams


class Generator:
    """A context manager: a process that streams some of the requests."""

    def __init__(self, host: str, port: int, requests: Sequence[bytes]) -> None:
        """Start it."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "client.bench.paced_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to this process, which ends the other
        )
        task = {
            "host": host,
            "port": port,
            "requests": [base64.b64encode(request).decode() for request in requests],
            "per_connection": _PER_CONNECTION,
        }
        self._tell(json.dumps(task))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_until_answered(self) -> None:
        """Wait until each stream has been answered once; raises `BenchError` if one failed."""
        self._hear()

    def stop(self) -> Arrivals:
        """End its streams; return what arrived. Raises `BenchError` if a request failed."""
        self._tell("stop")
        arrivals: Arrivals = self._hear()["arrivals"]
        return arrivals

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the missing answer is reported
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "a load generator died"}
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer


def run_wait_s(pid: int) -> float:
    """Return the seconds that the main thread of `pid` has been ready to run without a core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
