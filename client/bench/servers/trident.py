"""Trident as a measured server: the whole ensemble, by one of the ways to it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from client.bench.errors import BenchError
from client.bench.load.record import Form, Target
from client.bench.servers.arguments import all_named
from client.bench.servers.server import Server
from client.commands.gateway_process import GatewayOptions, GatewayProcess, gateway_endpoint
from engine.launch.server import TritonServer

TRIDENT = "trident"
ENGINE = "engine"  # the way to it without a server
WAYS: dict[str, Form] = {
    "grpc": "grpc",
    "http": "triton-http",
    "completions": "completions",
    "chat": "chat",
}


class Trident(Server):
    """A tritonserver serving the checkpoint in the folder `model`.

    Args:
        settings: override those of `engine.json` and the `TRIDENT_*` variables.
        way: how it is asked, of `WAYS`; the last two go through the gateway.

    Raises:
        ServerStartError: a setting is invalid.
    """

    def __init__(
        self,
        model: Path,
        settings: Mapping[str, str] = {},
        *,
        name: str = TRIDENT,
        way: str = "grpc",
    ) -> None:
        self.name = name
        self._settings = {**settings, "model": str(model)}
        self._form = WAYS[way]
        self._make_server()
        self._server: TritonServer | None = None
        self._gateway: GatewayProcess | None = None
        self._stack = ExitStack()

    @property
    def pids(self) -> list[int]:
        """As `Server.pids`."""
        assert self._server is not None
        return [self._server.pid, *([] if self._gateway is None else [self._gateway.pid])]

    @property
    def target(self) -> Target:
        """As `Server.target`."""
        assert self._server is not None
        if self._form == "grpc":
            return Target("grpc", self._server.grpc_url, self._server.model)
        if self._form == "triton-http":
            return Target("triton-http", f"http://{self._server.http_url}", self._server.model)
        return Target(self._form, self._url, self._server.model)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._server = server = self._make_server()
            self.launched = time.monotonic()
            stack.enter_context(server)
            self.metrics_url = f"http://{server.metrics_url}/metrics"
            if self._form in ("completions", "chat"):
                endpoint = gateway_endpoint(server, GatewayOptions("0", "127.0.0.1", 1))
                assert endpoint is not None
                self._url = f"http://{endpoint.url}/v1"
                self._gateway = stack.enter_context(
                    GatewayProcess(server, endpoint, 1, server.log_path)
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()
        self._server = self._gateway = None

    def _make_server(self) -> TritonServer:
        return TritonServer(self._settings, ports=0)


def parse_variants(arguments: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parse `NAME=SETTING=VALUE ...` arguments into settings by name.

    Raises:
        BenchError: an argument has another form; names it.
    """
    variants: dict[str, dict[str, str]] = {}
    for name, words in all_named("--trident", arguments, taken=[TRIDENT]).items():
        variants[name] = all_named(f"--trident {name}", words.split())
        if "model" in variants[name]:
            raise BenchError(f"--trident {name}: all serve the same model")
    return variants
