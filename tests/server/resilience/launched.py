"""Servers in processes of their own, to be killed: by `trident serve`, or plain tritonserver."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.launch.environment import server_environment, settings_variables
from engine.launch.installation import find_tritonserver, model_repository
from engine.launch.ports import pick_free
from engine.launch.processes import kill_all
from engine.launch.run_directory import RunDirectory
from tests.server.resilience.processes import Footprint, Tree

_START_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Running:
    """A running server.

    Attributes:
        openai_url: the gateway's, if there is one.
        top: the process that was started: the launcher, or tritonserver itself.
        log: output of the server and its launcher.
    """

    grpc_url: str
    http_url: str
    openai_url: str
    top: psutil.Process
    log: Path

    @property
    def tree(self) -> Tree:
        """The processes of the tritonserver that runs now."""
        family = [self.top, *self.top.children(recursive=True)]
        (head,) = (process for process in family if process.name() == "tritonserver")
        return Tree(head)

    def footprint(self) -> Footprint:
        """Return its current resources, the launcher and the gateway included."""
        launcher = frozenset({self.top, *self.top.children(recursive=True)})
        return self.tree.footprint() | Footprint(launcher)

    def is_ready(self) -> bool:
        """Return whether requests are answered: by the gateway, or else by tritonserver."""
        path = f"{self.openai_url}/health/ready"
        if not self.openai_url:
            path = f"{self.http_url}/v2/models/ensemble/ready"
        try:
            with urllib.request.urlopen(f"http://{path}", timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def launched(model: Path, *flags: str, has_gateway: bool = False) -> Iterator[Running]:
    """Run `trident serve` with further `flags`."""
    command = [sys.executable, "-m", "client.cli", "serve", "--model", str(model), *flags]
    command += [] if has_gateway else ["--openai-port", "off"]
    environment = {**os.environ, "PYTHONPATH": str(model_repository().parent)}
    with _running([*command, "--dtype", "float32"], environment, has_gateway) as running:
        yield running


@contextmanager
def plain(model: Path) -> Iterator[Running]:
    """Run tritonserver itself, without the launcher."""
    installation = find_tritonserver()
    run = RunDirectory()
    command = [
        str(installation.binary),
        f"--model-repository={model_repository()}",
        f"--backend-directory={run.add_backends(installation)}",
    ]
    environment = server_environment(
        os.environ,
        run_id=run.path.name,
        libraries=(*installation.libraries, run.add_libpython()),
        settings=settings_variables({"model": str(model), "dtype": "float32"}),
    )
    try:
        with _running(command, environment, has_gateway=False) as running:
            yield running
    finally:
        kill_all(run.path.name)
        run.remove()


@contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str], has_gateway: bool
) -> Iterator[Running]:
    names = ("http", "grpc", "metrics", *(["openai"] if has_gateway else []))
    ports = dict(zip(names, pick_free(len(names)), strict=True))
    flags = [f"--{name}-port={port}" for name, port in ports.items()]
    urls = {name: f"localhost:{port}" for name, port in ports.items()}
    with tempfile.TemporaryDirectory(prefix="resilience-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *flags], env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        top = psutil.Process(process.pid)
        running = Running(urls["grpc"], urls["http"], urls.get("openai", ""), top, log)
        try:
            _wait_until_ready(running, process)
            yield running
        finally:
            _end(process)


def _wait_until_ready(running: Running, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if running.is_ready():
            return
        time.sleep(0.1)
    said = running.log.read_text(errors="replace")[-2000:]
    raise AssertionError(f"the server did not start: {said}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
