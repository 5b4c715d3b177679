"""OpenAI-compatible servers, started by a command from the user."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import psutil

from client.bench.errors import BenchError
from client.bench.load.record import Target
from client.bench.servers.arguments import all_named
from client.bench.servers.server import Server, first_model
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

    def wait_until_ready(self) -> None:
        """Return when `/models` lists a model, and completions are not answered with 503.

        This takes one request before the first measured one.
        """
        end = time.monotonic() + _START_TIMEOUT_S
        while not (self._model and _is_loaded(self._url, self._model)):
            self.require_alive()
            if time.monotonic() > end:
                raise self._failure(f"was not ready after {_START_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
            with suppress(OSError, ValueError, LookupError, TypeError):
                self._model = self._model or first_model(self._url)

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

    def __exit__(self, *raised: object) -> None:
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


def _is_loaded(url: str, model: str) -> bool:
    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
    asked = urllib.request.Request(f"{url}/completions", body, {"content-type": "application/json"})
    try:
        urllib.request.urlopen(asked, timeout=_START_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        return error.code != 503  # llama.cpp's answer while it loads
    except OSError:
        return False
    return True


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
