"""GatewayProcess: the gateway that `trident serve` runs beside its server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from engine.launch import child
from engine.launch.errors import ServerStartError
from engine.launch.ports import Endpoint, pick_free
from engine.launch.readiness import responds
from engine.launch.server import TritonServer
from engine.restart_delay import RestartDelay

OFF = "off"
_START_TIMEOUT_S = 60
_END_TIMEOUT_S = 3  # without waiting for answers
_USEFUL_S = 10.0  # after so long it has not failed at its start
_POLL_S = 0.05
_TLS = "TRIDENT_TLS"  # and TRIDENT_TLS_CA ...: how clients speak with a server
_API_KEY = "TRIDENT_API_KEY"  # its own option's variable, which no list of processes shows
_TENANT_KEY = "TRIDENT_TENANT_KEY"  # likewise
# -P: no file of the working directory in place of a module.
_GATEWAY = (sys.executable, "-P", "-m", "client.cli", "gateway")


class GatewayProcess:
    """A gateway in front of `server`, from construction to `stop`; a context manager stops it.

    Args:
        server: which has been launched; it need not be ready.
        endpoint: where the gateway listens.
        options: further command-line options.
        log: the file for its lines: one for each request.
    """

    def __init__(
        self, server: TritonServer, endpoint: Endpoint, options: GatewayOptions, log: Path
    ) -> None:
        self._server = server
        self._endpoint = endpoint
        self._log = log
        self._patience_s = server.exit_timeout_s + _END_TIMEOUT_S
        self._command = _command(server, endpoint, options)
        self._environment = _environment(server, options)
        self._delay = RestartDelay()
        self._restart_at: float | None = None  # while it waits to be started again
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._started = time.monotonic()
        with self._log.open("ab") as file:
            return subprocess.Popen(
                child.tied(self._command, self._patience_s),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the launcher
            )

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
                raise self._failed_to_start()
            time.sleep(_POLL_S)

    def check_start(self) -> None:
        """Raise `ServerStartError` if it has ended before it was up."""
        if self._process.poll() is not None:
            raise self._failed_to_start()

    def keep_running(self) -> None:
        """Start it again if it has died, at once or later; to be called now and then."""
        if self._restart_at is None and (status := self._process.poll()) is not None:
            if time.monotonic() - self._started > _USEFUL_S:
                self._delay.succeeded()
            self._start_later(f"the gateway has died (exit status {status})")
        if self._restart_at is not None and time.monotonic() >= self._restart_at:
            try:
                # Workers of the old one may still finish their answers: they have closed the port.
                self._process, self._restart_at = self._spawn(), None
            except OSError as error:  # no memory, or no more processes
                self._start_later(f"the gateway cannot be started: {error.strerror}")

    def _start_later(self, why: str) -> None:
        delay_s = self._delay.next()
        self._restart_at = time.monotonic() + delay_s
        self._server.note(f"{why}; starting it again in {delay_s:g} s")

    def stop(self) -> None:
        """End it: answers in flight have as long as the server would give them."""
        try:
            self._process.terminate()
            self._process.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also when a second Ctrl-C ends the wait
            self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # nobody is left of its group
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # inside the kernel it may take for ever
            self._process.wait(_END_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _failed_to_start(self) -> ServerStartError:
        hint = f"--openai-port {OFF} leaves it out"
        return ServerStartError("the gateway failed to start", hint, self._log)


@dataclass(frozen=True)
class GatewayOptions:
    """Options of `trident serve` for its gateway.

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


def _command(server: TritonServer, endpoint: Endpoint, options: GatewayOptions) -> list[str]:
    command = [*_GATEWAY, "--triton-url", server.grpc_url, "--served-model-name", server.model]
    command += ["--host", endpoint.address, "--port", str(endpoint.port)]
    command += ["--workers", str(options.workers)]
    command += ["--shutdown-timeout", str(server.exit_timeout_s)]
    for name in model_names(server):
        command += ["--model-name", name]
    if "metrics" in server.endpoints:
        command += ["--triton-metrics-url", server.metrics_url]
    return [*command, "--tls"] if server.tls else command


def _environment(server: TritonServer, options: GatewayOptions) -> dict[str, str]:
    environment = dict(os.environ)
    if not server.tls:  # what is set is for other servers, those of `trident run`
        environment = {n: v for n, v in environment.items() if not n.startswith(_TLS)}
    if options.api_keys:
        environment[_API_KEY] = " ".join(options.api_keys)
    if server.config.tenant_key is not None:
        environment[_TENANT_KEY] = server.config.tenant_key
    return environment


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
        raise ServerStartError(
            "the gateway needs the gRPC service, which is switched off", leave_out
        )
    if missing := [name for name in _tls_variables(server) if not environ.get(name)]:
        raise ServerStartError(
            f"gRPC has TLS, and the gateway is a client of it: set {' and '.join(missing)} (and "
            "TRIDENT_TLS_NAME, if the certificate is for a name other than its address)",
            leave_out,
        )
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ServerStartError(f"--openai-port must be a port number or {OFF} (got {port!r})")
    if any(len(key.split()) != 1 for key in options.api_keys):
        raise ServerStartError("--api-key must not be empty or contain spaces")
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
