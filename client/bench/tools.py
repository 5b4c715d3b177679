"""Installs load generators, each once into its own folder below the cache.

Also code that their commands share.
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
    """The load for a tool, all figures at least 1.

    Attributes:
        streams: concurrent requests.
        requests: total number.
        max_tokens: of each answer.
    """

    streams: int
    requests: int
    max_tokens: int


class ToolEnvironment:
    """A virtual environment for one tool, separate from the project's.

    Attributes:
        path: the environment's folder, `$XDG_CACHE_HOME/trident/tools/<name>`.
    """

    def __init__(self, name: str, console: Console) -> None:
        self.path = cache_folder("tools", name)
        self._console = console

    @property
    def is_installed(self) -> bool:
        """Whether `finish` was reached, and the Python it was created with still exists."""
        return (self.path / _STAMP).exists() and (self.path / "bin" / "python").exists()

    def install(self, requirements: Sequence[str], *, with_dependencies: bool) -> None:
        """Install `requirements` with pip; reuses downloads of an interrupted call.

        Raises:
            BenchError: pip failed; it has printed why.
        """
        self.say(f"Installing {', '.join(requirements)} into {self.path} (once)")
        pip = self.path / "bin" / "pip"
        if not pip.exists():
            self.command([sys.executable, "-m", "venv", "--clear", str(self.path)])
        only = [] if with_dependencies else ["--no-deps"]
        self.command([str(pip), "--disable-pip-version-check", "install", *only, *requirements])

    def finish(self) -> None:
        """Mark the installation as complete; call this last."""
        (self.path / _STAMP).touch()

    def command(self, command: Sequence[str], *, folder: Path | None = None) -> None:
        """Run one step of the installation, with its output on the terminal.

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
        """Print progress."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def library_folder(environment: ToolEnvironment, name: str) -> Path:
    """Return the folder below an environment that contains the shared library `name`."""
    return next(environment.path.rglob(name)).parent


def extract_debian_package(environment: ToolEnvironment, package: str) -> None:
    """Download a Debian package and unpack it below the environment, without root.

    Raises:
        BenchError: this is not Debian or Ubuntu, or its package lists are missing.
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
    """Check that something listens at `url`, `host:port`, as the tools are slow to report it.

    Raises:
        BenchError: nothing does.
    """
    host, _, port = url.rpartition(":")
    try:
        socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError):
        raise BenchError(f"no server answers at {url}; start one with trident serve") from None


def is_given(arguments: Sequence[str], *flags: str) -> bool:
    """Return whether one of `flags` is in `arguments`, as `--flag value` or `--flag=value`."""
    return any(argument.partition("=")[0] in flags for argument in arguments)
