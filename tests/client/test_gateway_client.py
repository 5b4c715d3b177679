"""GatewayClient: what is about HTTP alone. (tests/client/test_client_protocol.py has the rest.)"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import trustme
from typer.testing import CliRunner

from client import (
    AccessDeniedError,
    ConfigurationError,
    ConnectError,
    ServerError,
    SSLOptions,
    TLSError,
    TridentClientError,
    UnavailableError,
    cli,
)
from client.gateway.security.tenants import read_tenants
from client.gateway.settings import GatewaySettings
from client.gateway_client import GatewayClient
from engine.launch.ports import pick_free
from tests.client.fake_triton import HELLO, FakeTriton
from tests.server.gateway.running import running


def _text(client: GatewayClient) -> str:
    return "".join(chunk.text for chunk in client.stream("a", max_tokens=9))


@pytest.fixture
def gateway(triton: FakeTriton, tmp_path: Path) -> Iterator[str]:
    """One with TLS and a key."""
    triton.pieces = HELLO
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("gateway.example.org")
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    tenants = read_tenants(["sk-a"], None)
    settings = GatewaySettings(
        (triton.url,), tenants=tenants, ssl_certfile=certificate, ssl_keyfile=key
    )
    with running(settings) as address:
        yield f"https://{address}"


def test_tls_and_a_key(gateway: str, tmp_path: Path) -> None:
    arguments = [
        "run",
        "--raw",
        "a",
        "--url",
        f"{gateway}/v1",
        "--tls-ca",
        str(tmp_path / "ca.pem"),
    ]
    arguments += ["--tls-name", "gateway.example.org", "--header", "x-request-id=mine"]
    result = CliRunner().invoke(cli.app, arguments, env={"TRIDENT_API_KEY": "sk-a sk-b"})
    assert (result.exit_code, result.output) == (0, "Hello world\n"), result.exception


def test_wrong_keys_and_certificates(gateway: str, tmp_path: Path) -> None:
    mine = SSLOptions(tmp_path / "ca.pem", server_name="gateway.example.org")
    with pytest.raises(AccessDeniedError, match="API key"):
        _text(GatewayClient(gateway, ssl=mine, api_key="sk-b"))
    with pytest.raises(TLSError, match=r"no TLS with 127\.0\.0\.1:\d+: unable to get local issuer"):
        _text(GatewayClient(gateway))
    with pytest.raises(TLSError, match="mismatch"):
        _text(GatewayClient(gateway, ssl=SSLOptions(tmp_path / "ca.pem")))
    with pytest.raises(UnavailableError, match=r"the connection with .* broke"):
        _text(GatewayClient(gateway.replace("https", "http"), retry=None))


@pytest.mark.parametrize(
    "url",
    [
        *("http://", "http://:80", "http://a:0x", "http://a:99999", "https://a/?b", "http://a/#b"),
        "http://user:password@a",
    ],
)
def test_addresses_are_checked(url: str) -> None:
    with pytest.raises(ConfigurationError, match="must be http://host:port or https://"):
        GatewayClient(url)


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="must be https://host:port"):
        GatewayClient("http://a", ssl=True)
    with pytest.raises(ConfigurationError, match="ssl: the certificates cannot be used"):
        GatewayClient("https://a", ssl=SSLOptions(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="authorization: is not printable ASCII") as caught:
        GatewayClient("http://a", api_key="sk-\n")
    assert "sk-" not in str(caught.value)


def test_nobody_answers() -> None:
    (port,) = pick_free(1)
    with pytest.raises(ConnectError, match=f"^no server answers at localhost:{port}$"):
        GatewayClient(f"http://localhost:{port}").health()


def test_something_else_answers(triton: FakeTriton) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b'{"error": "Not Found"}')  # as tritonserver

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(ServerError, match="HTTP status 404: that may be no gateway"):
            GatewayClient(f"http://127.0.0.1:{server.server_port}").health()
        thread.join()
    with pytest.raises(ServerError, match=r"^\S+ does not answer in HTTP: .* without http://$"):
        GatewayClient(f"http://{triton.url}").health()  # speaks gRPC


@pytest.mark.parametrize(
    "sent",
    ["", 'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 0}}\n\n'],
    ids=["nothing", "half"],
)
def test_a_stream_without_an_end(sent: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall((head + sent).encode())
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(65536):  # else what was not read resets the connection
                    pass

        thread = Thread(target=answer)
        thread.start()
        client = GatewayClient(f"http://127.0.0.1:{listener.getsockname()[1]}", retry=None)
        with pytest.raises(TridentClientError, match="ended the answer before it was complete"):
            _text(client)
        thread.join()
