"""Installs the ecosystem's load tools, each once, into a folder of its own below the cache.

Also what the commands that run them share.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from client.bench.cache import cache_folder
from client.bench.errors import BenchError

SDK_CONTAINER = "nvcr.io/nvidia/tritonserver:24.10-py3-sdk"
_STAMP = ".installed"


@dataclass(frozen=True)
class Load:
    """What a tool shall send, all figures at least 1.

    Attributes:
        streams: requests at once.
        requests: in all.
        max_tokens: of each answer.
    """

    streams: int
    requests: int
    max_tokens: int


class ToolEnvironment:
    """A virtual environment for one tool; the project's own is left alone.

    Attributes:
        path: the environment's folder, `$XDG_CACHE_HOME/trident/tools/<name>`.
    """

    def __init__(self, name: str, console: Console) -> None:
        self.path = cache_folder("tools", name)
        self._console = console

    @property
    def is_installed(self) -> bool:
        """Whether `finish` was reached, and the Python that it was made with is still there."""
        return (self.path / _STAMP).exists() and (self.path / "bin" / "python").exists()

    def install(self, requirements: Sequence[str], *, with_dependencies: bool) -> None:
        """Have pip install `requirements`; what an interrupted call fetched is used again.

        Raises:
            BenchError: pip failed; it has said why.
        """
        self.say(f"Installing {', '.join(requirements)} into {self.path} (once)")
        pip = self.path / "bin" / "pip"
        if not pip.exists():
            self.command([sys.executable, "-m", "venv", "--clear", str(self.path)])
        only = [] if with_dependencies else ["--no-deps"]
        self.command([str(pip), "--disable-pip-version-check", "install", *only, *requirements])

    def finish(self) -> None:
        """Note that all of it is there; to be called last."""
        (self.path / _STAMP).touch()

    def command(self, command: Sequence[str], *, folder: Path | None = None) -> None:
        """Run one step of the installation, its output going to the terminal.

        Raises:
            BenchError: it failed.
        """
        status = subprocess.run(command, cwd=folder, check=False).returncode
        if status != 0:
            raise BenchError(
                f"{Path(command[0]).name} failed with status {status}, see above; the next call "
                "goes on where this one stopped"
            )

    def say(self, text: str) -> None:
        """Tell the user what is being done."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def library_folder(environment: ToolEnvironment, name: str) -> Path:
    """Return the folder below an environment that holds the shared library `name`."""
    return next(environment.path.rglob(name)).parent


def extract_debian_package(environment: ToolEnvironment, package: str) -> None:
    """Fetch a Debian package and unpack it below the environment; root is not needed.

    Raises:
        BenchError: this is no Debian or Ubuntu, or its package lists are missing.
    """
    missing = [tool for tool in ("apt-get", "dpkg") if shutil.which(tool) is None]
    if missing:
        raise BenchError(
            f"the package {package} of Debian and Ubuntu is needed, and this machine has no "
            f"{missing[0]}; run the tool there, or in a container that brings it: {SDK_CONTAINER}"
        )
    folder = environment.path / package
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment.say(f"Fetching {package} with apt-get")
    try:
        environment.command(["apt-get", "download", package], folder=folder)
    except BenchError:
        raise BenchError(
            f"apt-get cannot download {package}, see above; as root: apt-get update"
        ) from None
    for archive in folder.glob("*.deb"):
        environment.command(["dpkg", "-x", str(archive), str(folder)])


def require_server(url: str) -> None:
    """Check that something listens at `url`, `host:port`: the tools are slow to say so.

    Raises:
        BenchError: nothing does.
    """
    host, _, port = url.rpartition(":")
    try:
        socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError):
        raise BenchError(f"no server answers at {url}; start one with trident serve") from None


def is_given(arguments: Sequence[str], *flags: str) -> bool:
    """Tell whether one of `flags` is among `arguments`, as `--flag value` or `--flag=value`."""
    return any(argument.partition("=")[0] in flags for argument in arguments)
