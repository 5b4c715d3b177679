"""Trident as a measured server: the whole ensemble by one of the ways to it, or the engine alone.

Settings override those of `engine.json` and the `TRIDENT_*` variables.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from client.bench.load.record import Form, Target
from client.bench.servers.server import Running, Server
from client.commands.gateway_process import GatewayOptions, GatewayProcess, gateway_endpoint
from engine.launch.environment import interpreter_folder, server_environment
from engine.launch.installation import find_tritonserver
from engine.launch.server import TritonServer
from engine.launch.worker_process import WorkerProcess
from engine.service.stub.environment import engine_environment

TRIDENT = "trident"
WAYS: dict[str, Form] = {
    "engine": "engine",  # without a server
    "grpc": "grpc",
    "http": "triton-http",
    "completions": "completions",
    "chat": "chat",
}


def trident(
    model: Path, settings: Mapping[str, str], *, name: str = TRIDENT, way: str = "grpc"
) -> Server:
    """Return Trident serving the checkpoint in the folder `model`.

    Args:
        way: how it is asked, of `WAYS`; the last two go through the gateway.

    Raises:
        ServerStartError: a setting is invalid.
    """
    settings = {**settings, "model": str(model)}
    config = TritonServer(settings, ports=0).config
    if way == "engine":
        target = Target("engine", "", str(model), settings=config.model_dump(mode="json"))
        return Server(name, partial(_engine_alone, target))
    return Server(name, partial(_ensemble, settings, WAYS[way]))


@contextmanager
def _ensemble(settings: Mapping[str, str], form: Form) -> Iterator[Running]:
    launched = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(TritonServer(settings, ports=0))
        pids = [server.pid]
        urls = {"grpc": server.grpc_url, "triton-http": f"http://{server.http_url}"}
        if form not in urls:
            options = GatewayOptions("0", "127.0.0.1")
            endpoint = gateway_endpoint(server, options)
            assert endpoint is not None
            gateway = GatewayProcess(server, endpoint, options, server.log_path)
            pids.append(stack.enter_context(gateway).pid)
            gateway.wait_until_up()
            urls[form] = f"http://{endpoint.url}/v1"
        metrics_url = f"http://{server.metrics_url}/metrics"
        yield Running(Target(form, urls[form], server.model), launched, pids, metrics_url)


@contextmanager
def _engine_alone(target: Target) -> Iterator[Running]:
    """The engine with the interpreter and the variables that it has in the server."""
    libraries = find_tritonserver().libraries
    environment = engine_environment(
        server_environment(os.environ, run_id="bench", libraries=libraries, settings={})
    )

    def end() -> str:
        status = worker.process.poll()
        return "" if status is None else f"the engine alone ended with status {status}; see above"

    launched = time.monotonic()
    worker = WorkerProcess(python=str(interpreter_folder() / "python3"), environ=environment)
    try:
        yield Running(target, launched, [worker.process.pid], worker=worker, end=end)
    finally:
        worker.end()
