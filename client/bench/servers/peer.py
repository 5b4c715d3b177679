"""OpenAI-compatible servers, started by a command from the user."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import aiohttp
import psutil

from client.bench.errors import BenchError
from client.bench.load.record import Target
from client.bench.servers.arguments import all_named
from client.bench.servers.server import Server
from engine.launch.ports import pick_free
from engine.launch.processes import uninterrupted

_START_TIMEOUT_S = 900.0  # some compile for minutes
_END_TIMEOUT_S = 10.0
_POLL_S = 0.1
_LAST_LINES = 8


@dataclass(frozen=True)
class PeerCommand:
    """How to start a peer.

    Attributes:
        name: shown in tables.
        command: its words; `{model}` stands for the checkpoint's folder, `{port}` for a free port.
    """

    name: str
    command: tuple[str, ...]


def parse_peers(commands: Sequence[str], *, taken: Container[str] = ()) -> list[PeerCommand]:
    """Parse `NAME=COMMAND` arguments.

    Args:
        taken: names already in use.

    Raises:
        BenchError: an argument is invalid; says why.
    """
    peers: list[PeerCommand] = []
    for name, command in all_named("--peer", commands, taken=taken).items():
        try:
            words = tuple(shlex.split(command))
        except ValueError as error:
            raise BenchError(f"--peer {name}: the command cannot be read: {error}") from None
        if "{port}" not in command:
            raise BenchError(f"--peer {name}: put {{port}} into the command")
        peers.append(PeerCommand(name, words))
    return peers


class Peer(Server):
    """A peer, serving the checkpoint in the folder `model`."""

    def __init__(self, command: PeerCommand, model: Path) -> None:
        self.name = command.name
        self._command = command
        self._checkpoint = model
        self._model = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pids(self) -> list[int]:
        """As `Server.pids`."""
        assert self._process is not None
        return [self._process.pid]

    @property
    def target(self) -> Target:
        """As `Server.target`."""
        return Target("completions", self._url, self._model)

    async def wait_until_ready(self) -> None:
        """Return when `/models` lists a model, and completions are not answered with 503.

        This takes one request before the first measured one.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_S), _session() as session:
                while not (self._model and await _is_loaded(session, self._url, self._model)):
                    self.require_alive()
                    await asyncio.sleep(_POLL_S)
                    self._model = self._model or await _first_model(session, self._url)
        except TimeoutError:
            raise self._failure(f"was not ready after {_START_TIMEOUT_S:g} s") from None

    def __enter__(self) -> Self:
        (port,) = pick_free(1)
        self._url = f"http://127.0.0.1:{port}/v1"
        model = str(self._checkpoint)
        words = [
            word.replace("{model}", model).replace("{port}", str(port))
            for word in self._command.command
        ]
        if not words or shutil.which(words[0]) is None:
            raise BenchError(
                f"{self.name}: {' '.join(words[:1]) or 'the command'} is not installed"
            )
        self._model = ""
        self.metrics_url = f"http://127.0.0.1:{port}/metrics"
        self._log: IO[bytes] = tempfile.TemporaryFile()
        self.launched = time.monotonic()
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, who then end it
            )
        except OSError as error:
            self._log.close()
            raise BenchError(f"{self.name}: cannot be started: {error}") from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process is not None
        with uninterrupted():
            _end(self._process)
            self._log.close()

    def require_alive(self) -> None:
        """As `Server.require_alive`."""
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            raise self._failure(f"ended with status {status}")

    def _failure(self, what: str) -> BenchError:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", errors="replace").splitlines()
        last_words = "\n".join(lines[-_LAST_LINES:])
        return BenchError(f"{self.name}: {what}; its last words:\n{last_words}")


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the name of the server's first model; empty while it does not answer."""
    with suppress(aiohttp.ClientError, OSError, ValueError, LookupError, TypeError):
        async with session.get(f"{url}/models") as response:
            models: Any = await response.json(content_type=None)
            if response.status == 200:
                return str(models["data"][0]["id"])
    return ""


async def _is_loaded(session: aiohttp.ClientSession, url: str, model: str) -> bool:
    body = {"model": model, "prompt": "a", "max_tokens": 1}
    with suppress(aiohttp.ClientError, OSError):
        async with session.post(f"{url}/completions", json=body) as response:
            return response.status != 503  # llama.cpp's answer while it loads
    return False


def _session() -> aiohttp.ClientSession:
    # One connection per request: some servers close theirs after a stream, which the next request
    # may not have noticed yet. No limit on the time of an answer.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=1, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all its descendants, with SIGTERM first."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT_S)
    with suppress(ProcessLookupError):  # processes started since; the group has the first one's id
        os.killpg(process.pid, signal.SIGKILL)
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    psutil.wait_procs(family, timeout=_END_TIMEOUT_S)
