"""Proxies of the environment: never for this machine, nor between a gateway and its servers."""

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from client import AsyncTridentClient, TridentClient, UnavailableError
from client.bench.servers.server import first_model
from client.connection import connection
from client.gateway.observability.metrics import scrape
from client.gateway.routing.pool import ServerPool
from engine.launch.ports import Endpoint
from engine.launch.readiness import responds
from tests.client.fake_triton import HELLO, FakeTriton
from tests.client.gateway.routing.told import told, until

NAMES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")


class Answering(BaseHTTPRequestHandler):
    """An HTTP server that lists one model, and whatever else is asked."""

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "one"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def web() -> Iterator[str]:
    """`host:port` of an HTTP server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The environment names a proxy, and excepts nothing; it is asked if this has a connection."""
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for name in NAMES:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            monkeypatch.setenv(name, url)
            monkeypatch.setenv(name.upper(), url)
        yield listener


def was_asked(proxy: socket.socket) -> bool:
    try:
        proxy.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "ipv4:127.0.0.1", "dns:///LOCALHOST"])
def test_client_of_this_machine_takes_no_proxy(
    host: str, triton: FakeTriton, proxied: socket.socket
) -> None:
    triton.pieces = HELLO
    port = triton.url.rpartition(":")[2]

    async def ask() -> str:
        async with AsyncTridentClient(f"{host}:{port}") as client:
            return (await client.generate("a", timeout=30)).text

    assert asyncio.run(ask())
    with TridentClient(f"{host}:{port}") as client:
        assert client.health(timeout=30).is_ready
    assert not was_asked(proxied)


@pytest.mark.parametrize(
    "url", ["[::1]:1", "ipv6:[::1]:1", "127.8.9.1:1", "grpc://localhost:1", "0.0.0.0:1", "[::]:1"]
)
def test_other_names_of_this_machine_take_no_proxy(url: str) -> None:
    assert ("grpc.enable_http_proxy", 0) in connection(url, False, {}).options


@pytest.mark.parametrize("url", ["a.example:1", "localhost.example:1", "10.0.0.127:1", "[::11]:1"])
def test_client_of_another_machine_may_take_a_proxy(url: str) -> None:
    assert "grpc.enable_http_proxy" not in dict(connection(url, False, {}).options)
    assert ("grpc.enable_http_proxy", 0) in connection(url, False, {}, proxy=False).options


@pytest.mark.parametrize(("proxy", "asked"), [(True, True), (False, False)])
def test_proxy_is_asked_for_another_machine_as_told(
    proxy: bool, asked: bool, proxied: socket.socket
) -> None:
    with (
        TridentClient("trident.invalid:1", retry=None, proxy=proxy) as client,
        pytest.raises(Exception, match=r"."),
    ):
        client.generate("a", timeout=0.5)
    assert was_asked(proxied) == asked


def test_gateway_asks_no_proxy_for_its_servers(proxied: socket.socket) -> None:
    async def main() -> None:
        async with ServerPool(["trident.invalid:1"]) as pool:
            with pytest.raises(UnavailableError):
                await pool.health(timeout=10)

    asyncio.run(main())
    assert not was_asked(proxied)


def test_http_of_our_own_asks_no_proxy(web: str, proxied: socket.socket) -> None:
    host, _, port = web.partition(":")
    assert responds(Endpoint("http", host, int(port)), "/health/ready")
    assert first_model(f"http://{web}") == "one"
    assert asyncio.run(scrape({"a": web})) == {"a": '{"data": [{"id": "one"}]}'}
    assert not was_asked(proxied)


def test_gateway_logs_why_a_server_is_not_used_once(
    triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    triton.health = '{"state": "dead", "detail": "out of memory"}'
    caplog.set_level(logging.INFO, "trident.gateway")

    async def main() -> None:
        async with ServerPool([triton.url, "localhost:1"]) as pool:
            await until(pool, triton, up=0)
            for _ in range(5):
                with pytest.raises(UnavailableError):
                    async for _ in pool.stream("a"):
                        pass
            triton.health = '{"state": "dead", "detail": "no GPU"}'
            async with asyncio.timeout(60):
                while "no GPU" not in caplog.text:
                    await asyncio.sleep(0.01)
            triton.health = '{"state": "ready"}'
            await until(pool, triton, up=1)
            assert told(pool, triton)["up"]

    asyncio.run(main())
    assert sorted(caplog.messages) == [
        "server localhost:1 is not used: no server answers at localhost:1",
        f"server {triton.url} is not used: its engine is dead: no GPU",
        f"server {triton.url} is not used: its engine is dead: out of memory",
        f"server {triton.url} takes requests again",
    ]
