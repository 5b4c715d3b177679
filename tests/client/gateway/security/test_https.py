"""The gateway's own certificate."""

from __future__ import annotations

import ssl
import urllib.request
from pathlib import Path

import pytest
import trustme

from client import ConfigurationError
from client.gateway.processes.server import make_server
from client.gateway.settings import GatewaySettings
from tests.client.fake_triton import FakeTriton
from tests.server.gateway.running import running


def test_requests_are_encrypted(triton: FakeTriton, tmp_path: Path) -> None:
    authority = trustme.CA()
    own = authority.issue_cert("localhost")
    certificate, key = tmp_path / "server.crt", tmp_path / "server.key"
    own.cert_chain_pems[0].write_to_path(certificate)
    own.private_key_pem.write_to_path(key)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    settings = GatewaySettings((triton.url,), ssl_certfile=certificate, ssl_keyfile=key)
    with running(settings) as address:
        port = address.split(":")[1]
        url = f"https://localhost:{port}/health"
        with urllib.request.urlopen(url, timeout=10, context=context) as response:
            assert response.status == 200
        with pytest.raises(OSError, match=r"."):
            urllib.request.urlopen(f"http://{address}/health", timeout=10)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_wrong_certificate_ends_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "server.crt"
    if content is not None:
        file.write_text(content)
    settings = GatewaySettings(ssl_certfile=file, ssl_keyfile=file)
    with pytest.raises(ConfigurationError, match="ssl_certfile"):
        make_server(settings, "127.0.0.1", 0)
