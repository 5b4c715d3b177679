"""Where `trident serve` has its gateway listen, and when it cannot have one."""

from pathlib import Path

import pytest
import trustme

from client.commands.gateway_process import GatewayOptions, gateway_endpoint
from engine.launch.errors import ServerStartError
from engine.launch.server import TritonServer

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
