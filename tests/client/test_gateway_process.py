"""The gateway that `trident serve` runs: where it listens, and its end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import trustme

from client.commands import gateway_process
from client.commands.gateway_process import GatewayOptions, GatewayProcess, gateway_endpoint
from engine.launch.errors import ServerStartError
from engine.launch.ports import Endpoint, pick_free
from engine.launch.server import TritonServer
from tests.client.fake_triton import FakeTriton, Piece

EXIT_TIMEOUT_S = 1
ALONE = GatewayOptions("0", "127.0.0.1")


@pytest.fixture
def notes() -> list[str]:
    """What the gateway's process has told its server's log."""
    return []


def _server(
    triton: FakeTriton, notes: list[str] | None = None, tenant_key: str | None = None
) -> Any:
    """Return what a gateway needs to know of a server without TLS."""
    return SimpleNamespace(
        note=[].append if notes is None else notes.append,
        grpc_url=triton.url,
        model="ensemble",
        config=SimpleNamespace(served_model_name=None, model="demo", tenant_key=tenant_key),
        endpoints={},
        tls=False,
        exit_timeout_s=EXIT_TIMEOUT_S,
    )


@pytest.fixture(params=[1, 2], ids=["alone", "workers"])
def gateway(
    request: pytest.FixtureRequest,
    triton: FakeTriton,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    notes: list[str],
) -> Iterator[tuple[GatewayProcess, Endpoint]]:
    """One in front of a server whose answers take long."""
    triton.pieces = [Piece({0: "a"}), *(Piece({0: "b"}, delay_s=0.1) for _ in range(300))]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    endpoint = Endpoint("openai", "127.0.0.1", pick_free(1)[0])
    options = replace(ALONE, workers=request.param)
    with GatewayProcess(_server(triton, notes), endpoint, options, tmp_path / "log") as gateway:
        gateway.wait_until_up()
        yield gateway, endpoint


@pytest.mark.parametrize(
    ("variable", "value"), [("TRIDENT_TLS", "1"), ("TRIDENT_TLS_CA", "/nowhere/ca.crt")]
)
def test_tls_of_other_servers_is_not_for_it(
    triton: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setattr(gateway_process, "_START_TIMEOUT_S", 10)
    monkeypatch.setenv(variable, value)  # as `trident run` of this shell needs them
    endpoint = Endpoint("openai", "127.0.0.1", pick_free(1)[0])
    with GatewayProcess(_server(triton), endpoint, ALONE, tmp_path / "log") as gateway:
        gateway.wait_until_up()


def test_its_keys_are_in_no_list_of_processes(
    triton: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIDENT_API_KEY", "sk-of-the-shell")
    endpoint = Endpoint("openai", "127.0.0.1", pick_free(1)[0])
    options = replace(ALONE, api_keys=("sk-a", "sk-b"))
    server = _server(triton, tenant_key="sk-of-the-server")
    with GatewayProcess(server, endpoint, options, tmp_path / "log") as gateway:
        gateway.wait_until_up()
        processes = [psutil.Process(gateway.pid)]
        processes += processes[0].children(recursive=True)
        assert not any("sk-" in word for each in processes for word in each.cmdline())
        answers = {key: _status(endpoint, key) for key in ("sk-a", "sk-b", "sk-of-the-shell", "")}
        _ask(endpoint, "sk-a")
        asked = triton.requests[-1]["sampling_parameters"]
    assert answers == {"sk-a": 200, "sk-b": 200, "sk-of-the-shell": 401, "": 401}
    # So the server takes the keys' tenants apart.
    assert (asked["tenant"][:4], asked["tenant_key"]) == ("key-", "sk-of-the-server")


def _ask(endpoint: Endpoint, key: str) -> None:
    with closing(http.client.HTTPConnection(endpoint.address, endpoint.port)) as connection:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request("POST", "/v1/completions", b'{"prompt": "a"}', headers)
        connection.getresponse().read()


def _status(endpoint: Endpoint, key: str) -> int:
    with closing(http.client.HTTPConnection(endpoint.address, endpoint.port)) as connection:
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
        return connection.getresponse().status


def _workers(gateway: int) -> list[psutil.Process]:
    """Return those of a gateway; another of its children watches the launcher."""
    worker = "client.gateway.processes.worker"
    return [each for each in psutil.Process(gateway).children() if worker in each.cmdline()]


def test_an_answer_that_takes_too_long_ends_with_an_error(
    gateway: tuple[GatewayProcess, Endpoint], tmp_path: Path
) -> None:
    process, endpoint = gateway
    workers = psutil.Process(process.pid).children()
    with closing(http.client.HTTPConnection(endpoint.address, endpoint.port)) as connection:
        body = json.dumps({"prompt": "a", "stream": True})
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        started = time.monotonic()
        process.stop()
        assert EXIT_TIMEOUT_S <= time.monotonic() - started < EXIT_TIMEOUT_S + 3
        lines = [line for line in answer.read().splitlines() if line]
        assert b"the gateway is shutting down" in lines[-2]
        assert lines[-1] == b"data: [DONE]"
    assert not psutil.wait_procs(workers, 5)[1]
    assert not list(tmp_path.glob("trident_gateway_*"))


@pytest.mark.parametrize("gateway", [2], indirect=True)
def test_one_that_hangs_is_killed(gateway: tuple[GatewayProcess, Endpoint]) -> None:
    process, _ = gateway
    workers = _workers(process.pid)
    for each in (process.pid, *(worker.pid for worker in workers)):
        os.kill(each, signal.SIGSTOP)
    process.stop()
    assert not psutil.pid_exists(process.pid)
    assert not psutil.wait_procs(workers, 5)[1]


@pytest.mark.parametrize("gateway", [1], indirect=True, ids=["alone"])
def test_one_that_dies_is_started_again_at_its_address(
    gateway: tuple[GatewayProcess, Endpoint], notes: list[str]
) -> None:
    process, endpoint = gateway
    pids = [process.pid]
    for _ in range(2):
        os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while process.pid == pids[-1]:
            assert time.monotonic() < deadline
            process.keep_running()
            time.sleep(0.05)
        pids.append(process.pid)
    assert notes == [
        f"the gateway has died (exit status -9); starting it again in {seconds:g} s"
        for seconds in (0, 0.5)
    ]
    process.wait_until_up()
    assert _status(endpoint, "") == 200


TLS = {"TRIDENT_SSL_CERTFILE": "server.crt", "TRIDENT_SSL_KEYFILE": "server.key"}


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path("server.crt")
    issued.private_key_pem.write_to_path("server.key")
    authority.cert_pem.write_to_path("ca.crt")


def test_a_port_or_none() -> None:
    server = TritonServer(ports=0, environ={})
    given = gateway_endpoint(server, GatewayOptions("9009", "127.0.0.1"), {})
    assert given is not None
    assert (given.address, given.port) == ("127.0.0.1", 9009)
    free = gateway_endpoint(server, GatewayOptions("0", "127.0.0.1"), {})
    assert free is not None
    assert free.port > 0
    assert gateway_endpoint(server, GatewayOptions("off", "127.0.0.1"), {}) is None
    for wrong in ("x", "-1", "65536"):
        with pytest.raises(ServerStartError, match="--openai-port must be a port number or off"):
            gateway_endpoint(server, GatewayOptions(wrong, "127.0.0.1"), {})


@pytest.mark.usefixtures("certificates")
def test_tls_needs_what_a_client_needs() -> None:
    server = TritonServer(ports=0, environ=TLS)
    with pytest.raises(ServerStartError, match=r"set TRIDENT_TLS_CA \(") as caught:
        gateway_endpoint(server, GatewayOptions("0", "127.0.0.1"), {"TRIDENT_TLS_CA": ""})
    assert caught.value.hint == "--openai-port off leaves the gateway out"
    assert (
        gateway_endpoint(server, GatewayOptions("0", "127.0.0.1"), {"TRIDENT_TLS_CA": "ca.crt"})
        is not None
    )
    assert gateway_endpoint(server, GatewayOptions("off", "127.0.0.1"), {}) is None


@pytest.mark.usefixtures("certificates")
def test_mutual_tls_needs_a_certificate_too() -> None:
    server = TritonServer(ports=0, environ={**TLS, "TRIDENT_SSL_CA_CERTS": "ca.crt"})
    with pytest.raises(ServerStartError, match="set TRIDENT_TLS_CERT and TRIDENT_TLS_KEY"):
        gateway_endpoint(server, GatewayOptions("0", "127.0.0.1"), {"TRIDENT_TLS_CA": "ca.crt"})


def test_without_grpc_there_is_nobody_to_ask() -> None:
    server = TritonServer(arguments=["--allow-grpc=false"], ports=0, environ={})
    with pytest.raises(ServerStartError, match="needs the gRPC service"):
        gateway_endpoint(server, GatewayOptions("0", "127.0.0.1"), {})
