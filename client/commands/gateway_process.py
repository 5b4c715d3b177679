"""GatewayProcess: the gateway that `trident serve` runs beside its server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from engine.launch import child
from engine.launch.errors import ServerStartError, StageDiedError
from engine.launch.ports import Endpoint, pick_free
from engine.launch.server import TritonServer

OFF = "off"
_START_TIMEOUT_S = 60
_STOP_TIMEOUT_S = 10
_POLL_S = 0.05
_COMMAND = (sys.executable, "-m", "client.cli", "gateway")


class GatewayProcess:
    """A gateway in front of `server`, from construction to `stop`; a context manager stops it.

    Args:
        server: which has been started.
        endpoint: where the gateway listens.
        log: the file for its lines: one for each request.

    Raises:
        ServerStartError: at construction, if it does not come up.
    """

    def __init__(self, server: TritonServer, endpoint: Endpoint, log: Path) -> None:
        command = [*_COMMAND, "--triton-url", server.grpc_url, "--served-model-name", server.model]
        command += ["--host", endpoint.address, "--port", str(endpoint.port)]
        for name in model_names(server):
            command += ["--model-name", name]
        if "metrics" in server.endpoints:
            command += ["--triton-metrics-url", server.metrics_url]
        if server.tls:
            command += ["--tls"]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-I", child.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        self._log = log
        try:
            self._wait_until_up(endpoint)
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raise `StageDiedError` if it has ended by itself."""
        if (status := self._process.poll()) is not None:
            raise StageDiedError(f"the gateway has died (exit status {status})")

    def stop(self) -> None:
        """End it: answers in flight have a moment."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_until_up(self, endpoint: Endpoint) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _answers(endpoint):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerStartError(
                    "the gateway does not come up", f"--openai-port {OFF} leaves it out", self._log
                )
            time.sleep(_POLL_S)


def gateway_endpoint(
    server: TritonServer, port: str, host: str, environ: Mapping[str, str] = os.environ
) -> Endpoint | None:
    """Return where the gateway of `server` is to listen; None: there is to be none.

    Args:
        port: a number, 0 for a free one, or `off`.
        host: the address.
        environ: tells whether a gateway can trust the server's certificate.

    Raises:
        ServerStartError: `port` is wrong.
    """
    if port == OFF or "grpc" not in server.endpoints:
        return None
    if server.tls and "TRIDENT_TLS_CA" not in environ:
        return None
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ServerStartError(f"--openai-port must be a port number or {OFF} (got {port!r})")
    return Endpoint("openai", host, int(port) or pick_free(1)[0])


def model_names(server: TritonServer) -> list[str]:
    """Return the names that clients may call the model by: the one it was given, and Triton's."""
    own = server.config.served_model_name or server.config.model
    return list(dict.fromkeys([own, server.model]))


def _answers(endpoint: Endpoint) -> bool:
    try:
        with urllib.request.urlopen(f"http://{endpoint.url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
