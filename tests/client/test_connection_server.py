"""The clients' connections to the real tritonserver: keep-alive, TLS, restricted endpoints."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from client import SSLOptions, TridentClient, connection
from client.errors import AccessDeniedError, UnavailableError
from engine.launch.installation import find_tritonserver
from engine.launch.server import TritonServer
from tests.client.clients import Connect
from tests.client.scripted_model import write_repository

pytestmark = pytest.mark.server

MIN_PING_INTERVAL_MS = 300_000  # tritonserver's default
SCALE = 150  # minutes become fractions of a second; gRPC pings once a second at most
HEADERS = {"triton-grpc-protocol-gate-key": "s3cret"}
SILENCE_S = 11  # of five pings, the fourth bad one would be the last


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pem")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, pem: Path) -> Iterator[TritonServer]:
    arguments = [
        "--grpc-use-ssl=true",
        f"--grpc-server-cert={pem / 'cert.pem'}",
        f"--grpc-server-key={pem / 'key.pem'}",
        "--grpc-restricted-protocol=inference,model-config:gate-key=s3cret",
        f"--grpc-http2-min-recv-ping-interval-without-data={MIN_PING_INTERVAL_MS // SCALE}",
        "--exit-timeout-secs=1",  # a request that was given up waits on
    ]
    repository = write_repository(tmp_path_factory.mktemp("repository"))
    with TritonServer({}, arguments=arguments, repository=repository, ports=0) as running:
        yield running


def test_pings_are_within_tritonservers_defaults() -> None:
    installation = find_tritonserver()
    libraries = ":".join(map(str, installation.libraries))
    shown = subprocess.run(
        [str(installation.binary), "--help"],
        env={**os.environ, "LD_LIBRARY_PATH": libraries},
        capture_output=True,
        text=True,
        check=False,
    )
    help_text = " ".join((shown.stdout + shown.stderr).split())
    assert f"Default is {MIN_PING_INTERVAL_MS} (5 minutes)" in help_text
    assert re.search(r"permit-without-calls .*? Default is 0 \(false\)", help_text)
    assert connection.KEEPALIVE_TIME_MS > MIN_PING_INTERVAL_MS
    options = dict(connection.connection("localhost:1", False, {}).options)
    assert options["grpc.keepalive_permit_without_calls"] == 0


@pytest.mark.parametrize(
    ("ping_ms", "survives"),
    [
        (1000, False),
        pytest.param(connection.KEEPALIVE_TIME_MS // SCALE, True, marks=pytest.mark.large),
    ],
)
def test_pings_in_a_long_silence(
    server: TritonServer, pem: Path, ping_ms: int, survives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "KEEPALIVE_TIME_MS", ping_ms)
    ssl = SSLOptions(pem / "ca.pem")
    with TridentClient(server.grpc_url, ssl=ssl, headers=HEADERS, retry=None) as client:
        if survives:
            assert client.generate(f"!wait {SILENCE_S}").text.startswith("!wait")
        else:  # this is what happens to clients that ping too often
            with pytest.raises(UnavailableError, match="Too many pings"):
                client.generate(f"!wait {SILENCE_S}")


def test_restricted_endpoints(server: TritonServer, pem: Path, connect: Connect) -> None:
    ssl = SSLOptions(pem / "ca.pem")
    for headers in ({}, {"triton-grpc-protocol-gate-key": "wrong"}):
        with (
            connect(server.grpc_url, ssl=ssl, headers=headers) as client,
            pytest.raises(AccessDeniedError, match="triton-grpc-protocol-gate-key"),
        ):
            client.generate("one two")
    with connect(server.grpc_url, ssl=ssl, headers=HEADERS) as client:
        assert client.generate("one two").text == "one two"
        assert client.is_ready()  # this repository has no engine to ask


def test_without_tls(server: TritonServer, connect: Connect) -> None:
    with (
        connect(server.grpc_url, headers=HEADERS, retry=None) as client,
        pytest.raises(UnavailableError, match="may want TLS"),
    ):
        client.generate("one two")
