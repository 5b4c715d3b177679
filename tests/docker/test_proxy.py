"""docker/nginx.conf: HTTP with TLS, for which tritonserver needs a proxy."""

from __future__ import annotations

import http.client
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme

from engine.launch.ports import pick_free
from tests.docker.files import DOCKER

pytestmark = pytest.mark.skipif(
    shutil.which("nginx") is None, reason="nginx is not on PATH; Debian's package nginx brings it"
)


class Upstream(BaseHTTPRequestHandler):
    """In tritonserver's place: says what it was asked, and streams two events a second apart."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(self.path.encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("generate_stream"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for pause in (0, 1):
                time.sleep(pause)
                self.wfile.write(b"9\r\ndata: {}\n\r\n")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self._answer(self.path.encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


class Proxy:
    """nginx before an `Upstream`."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        certificate = authority.issue_cert("localhost")
        certificate.cert_chain_pems[0].write_to_path(folder / "server.crt")
        certificate.private_key_pem.write_to_path(folder / "server.key")
        self.context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
        self.upstream = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
        threading.Thread(target=self.upstream.serve_forever, daemon=True).start()
        (self.port,) = pick_free(1)
        text = (DOCKER / "nginx.conf").read_text()
        places = "".join(
            f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi")
        )
        for old, new in {
            "127.0.0.1:8000": f"127.0.0.1:{self.upstream.server_port}",
            "8443": f"127.0.0.1:{self.port}",
            "/certificates": str(folder),
            "http {": f"http {{ access_log off; uwsgi_temp_path {folder}; "
            f"scgi_temp_path {folder}; {places}",
        }.items():
            assert old in text
            text = text.replace(old, new)
        (folder / "nginx.conf").write_text(text)
        options = f"daemon off; master_process off; pid {folder}/pid; error_log stderr;"
        self.process = subprocess.Popen(
            ["nginx", "-p", folder, "-c", folder / "nginx.conf", "-g", options],
            stderr=subprocess.PIPE,
            text=True,
        )

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("localhost", self.port, context=self.context, timeout=30)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = self.connect()
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)
        self.upstream.shutdown()
        self.upstream.server_close()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    proxy = Proxy(tmp_path_factory.mktemp("nginx"))
    try:
        for _ in range(100):
            assert proxy.process.poll() is None, (
                proxy.process.stderr and proxy.process.stderr.read()
            )
            try:
                proxy.ask("GET", "/v2/health/live")
                break
            except ConnectionError:
                time.sleep(0.05)
        yield proxy
    finally:
        proxy.stop()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2"),
        ("GET", "/v2/health/ready"),
        ("GET", "/v2/models/ensemble"),
        ("GET", "/v2/models/ensemble/ready"),
        ("POST", "/v2/models/ensemble/generate"),
        ("GET", "/v2/models/tensorrt_llm_bls"),
        ("POST", "/v2/models/tensorrt_llm_bls/infer"),
    ],
)
def test_what_clients_need_gets_through(proxy: Proxy, method: str, path: str) -> None:
    body = b"{}" if method == "POST" else None
    assert proxy.ask(method, path, body) == (200, path.encode())


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/logging",
        "/v2/models/engine/generate",
        "/v2/models/detokenizer/infer",
        "/v2/models/ensemble/infer",
        "/v2/models/tensorrt_llm_bls/generate_stream",
        "/v2/models/ensemble/generate/../../../logging",
        "/v2/models/ensemble%2f..%2f..%2frepository/index",
        "/metrics",
        "/",
    ],
)
def test_nothing_else_does(proxy: Proxy, path: str) -> None:
    assert proxy.ask("POST", path, b"{}")[0] == 404


def test_events_come_one_by_one(proxy: Proxy) -> None:
    connection = proxy.connect()
    started = time.monotonic()
    connection.request("POST", "/v2/models/ensemble/generate_stream", b"{}")
    response = connection.getresponse()
    assert response.readline() == b"data: {}\n"
    first = time.monotonic() - started
    response.read()
    assert time.monotonic() - started - first > 0.5
    connection.close()


def test_a_body_that_is_too_long(proxy: Proxy) -> None:
    status, _ = proxy.ask("POST", "/v2/models/ensemble/generate", b"x" * (9 << 20))
    assert status == 413
