"""Servers in processes of their own, to be killed: by `trident serve`, or plain tritonserver."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
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
        top: the process that was started: the launcher, or tritonserver itself.
        tree: tritonserver's processes.
        log: output of the server and its launcher.
    """

    grpc_url: str
    http_url: str
    top: psutil.Process
    tree: Tree
    log: Path

    def footprint(self) -> Footprint:
        """Return its current resources, the launcher included."""
        return self.tree.footprint() | Footprint(frozenset({self.top}))


@contextmanager
def launched(model: Path) -> Iterator[Running]:
    """Run `trident serve`."""
    command = [sys.executable, "-m", "client.cli", "serve", "--model", str(model)]
    command += ["--openai-port", "off"]
    environment = {**os.environ, "PYTHONPATH": str(model_repository().parent)}
    with _running([*command, "--dtype", "float32"], environment) as running:
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
        with _running(command, environment) as running:
            yield running
    finally:
        kill_all(run.path.name)
        run.remove()


@contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Running]:
    ports = dict(zip(("http", "grpc", "metrics"), pick_free(3), strict=True))
    flags = [f"--{name}-port={port}" for name, port in ports.items()]
    urls = {name: f"localhost:{port}" for name, port in ports.items()}
    with tempfile.TemporaryDirectory(prefix="resilience-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *flags], env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        try:
            _wait_until_ready(urls["http"], process, log)
            top = psutil.Process(process.pid)
            yield Running(urls["grpc"], urls["http"], top, Tree(_tritonserver(top)), log)
        finally:
            _end(process)


def _wait_until_ready(http_url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://{http_url}/v2/models/ensemble/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")


def _tritonserver(top: psutil.Process) -> psutil.Process:
    family = [top, *top.children(recursive=True)]
    (head,) = (process for process in family if process.name() == "tritonserver")
    return head


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
