"""GatewayProcess: the gateway that `trident serve` runs beside its server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from engine.launch import child
from engine.launch.errors import ServerStartError, StageDiedError
from engine.launch.ports import Endpoint, pick_free
from engine.launch.readiness import responds
from engine.launch.server import TritonServer

OFF = "off"
_START_TIMEOUT_S = 60
_END_TIMEOUT_S = 2  # without waiting for answers
_POLL_S = 0.05
_TLS = "TRIDENT_TLS"  # and TRIDENT_TLS_CA ...: how clients speak with a server
_API_KEY = "TRIDENT_API_KEY"  # its own option's variable, which no list of processes shows
_TENANT_KEY = "TRIDENT_TENANT_KEY"  # likewise
# -P: no file of the working directory in place of a module.
_COMMAND = (sys.executable, "-P", "-m", "client.cli", "gateway")


class GatewayProcess:
    """A gateway in front of `server`, from construction to `stop`; a context manager stops it.

    Args:
        server: which has been launched; it need not be ready.
        endpoint: where the gateway listens.
        options: what else it is told.
        log: the file for its lines: one for each request.
    """

    def __init__(
        self, server: TritonServer, endpoint: Endpoint, options: GatewayOptions, log: Path
    ) -> None:
        command = [*_COMMAND, "--triton-url", server.grpc_url, "--served-model-name", server.model]
        command += ["--host", endpoint.address, "--port", str(endpoint.port)]
        command += ["--workers", str(options.workers)]
        for name in model_names(server):
            command += ["--model-name", name]
        if "metrics" in server.endpoints:
            command += ["--triton-metrics-url", server.metrics_url]
        environment = dict(os.environ)
        if server.tls:
            command += ["--tls"]
        else:  # what is set is for other servers, those of `trident run`
            environment = {n: v for n, v in environment.items() if not n.startswith(_TLS)}
        if options.api_keys:
            environment[_API_KEY] = " ".join(options.api_keys)
        if server.config.tenant_key is not None:
            environment[_TENANT_KEY] = server.config.tenant_key
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-I", child.__file__, str(os.getpid()), *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        self._endpoint = endpoint
        self._log = log
        self._stop_timeout_s = server.exit_timeout_s

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_until_up(self) -> None:
        """Return when it takes requests, for a server that is ready.

        Raises:
            ServerStartError: it does not.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not responds(self._endpoint, "/health/ready"):
            self.check_start()
            if time.monotonic() > deadline:
                raise self._does_not_come_up()
            time.sleep(_POLL_S)

    def check_start(self) -> None:
        """Raise `ServerStartError` if it has ended before it was up."""
        if self._process.poll() is not None:
            raise self._does_not_come_up()

    def check(self) -> None:
        """Raise `StageDiedError` if it has ended by itself."""
        if (status := self._process.poll()) is not None:
            raise StageDiedError(f"the gateway has died (exit status {status})")

    def stop(self) -> None:
        """End it: answers in flight have as long as the server would give them."""
        self._process.terminate()
        # After SIGINT it waits for no answer.
        for seconds, last in (
            (self._stop_timeout_s, signal.SIGINT),
            (_END_TIMEOUT_S, signal.SIGKILL),
        ):
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, last)
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

    def _does_not_come_up(self) -> ServerStartError:
        hint = f"--openai-port {OFF} leaves it out"
        return ServerStartError("the gateway does not come up", hint, self._log)


@dataclass(frozen=True)
class GatewayOptions:
    """What `trident serve` is told of its gateway.

    Attributes:
        port: a number, 0 for a free one, or `off`.
        host: the address.
        workers: its processes.
        api_keys: let their holders in; those of its variable do not, then.
    """

    port: str
    host: str
    workers: int = 1
    api_keys: tuple[str, ...] = ()

    def asks_for_key(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether it lets only some in, with `environ` as its environment."""
        return bool(self.api_keys or environ.get(_API_KEY) or environ.get(f"{_API_KEY}_FILE"))


def gateway_endpoint(
    server: TritonServer, options: GatewayOptions, environ: Mapping[str, str] = os.environ
) -> Endpoint | None:
    """Return where the gateway of `server` is to listen; None: there is to be none.

    Args:
        server: which need not have been started.
        options: as they were given.
        environ: the gateway's environment.

    Raises:
        ServerStartError: the port is wrong, or the gateway could not reach the server.
    """
    port = options.port
    if port == OFF:
        return None
    leave_out = f"--openai-port {OFF} leaves the gateway out"
    if "grpc" not in server.endpoints:
        raise ServerStartError("the gateway needs the gRPC service, which is off", leave_out)
    if missing := [name for name in _tls_variables(server) if not environ.get(name)]:
        raise ServerStartError(
            f"gRPC has TLS, and the gateway is a client of it: set {' and '.join(missing)} "
            "(and TRIDENT_TLS_NAME, if the certificate is not for its address)",
            leave_out,
        )
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ServerStartError(f"--openai-port must be a port number or {OFF} (got {port!r})")
    if any(len(key.split()) != 1 for key in options.api_keys):
        raise ServerStartError("--api-key must not be empty or have spaces in it")
    others = [each.port for each in server.endpoints.values()]
    return Endpoint("openai", options.host, int(port) or pick_free(1, taken=others)[0])


def _tls_variables(server: TritonServer) -> Iterator[str]:
    """Yield the variables without which a gateway cannot be a client of `server`."""
    if server.tls:
        yield "TRIDENT_TLS_CA"
    if server.wants_certificates:
        yield from ("TRIDENT_TLS_CERT", "TRIDENT_TLS_KEY")


def model_names(server: TritonServer) -> list[str]:
    """Return the names that clients may call the model by: the one it was given, and Triton's."""
    own = server.config.served_model_name or server.config.model
    return list(dict.fromkeys([own, server.model]))
