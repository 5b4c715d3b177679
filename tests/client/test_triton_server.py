"""The launcher and the clients with the real tritonserver, on a scripted model repository."""

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib import request as http
from urllib.error import HTTPError

import psutil
import pytest

from client import AsyncTridentClient, TridentClient
from client.errors import InvalidRequestError, RequestTimeoutError
from engine.launch.errors import ServerStartError
from engine.launch.server import TritonServer
from tests.client.scripted_model import write_repository
from tests.waiting import eventually

pytestmark = pytest.mark.server

LONG = " ".join(["word"] * 3000)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # In a folder whose name Triton itself, which does not quote it, could not use.
    return write_repository(tmp_path_factory.mktemp("repository") / "a ü")


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    with TritonServer({"max_num_seqs": 7}, repository=repository, ports=0) as running:
        yield running


class TestClients:
    def test_sync(self, server: TritonServer) -> None:
        with TridentClient(server.grpc_url) as client:
            assert client.is_ready()
            whole = client.generate("grüße 東京 🚀", max_tokens=5)
            assert (whole.text, whole.finish_reason) == ("grüße 東京 🚀", "stop")
            chunks = list(client.stream("a b c"))
        assert [chunk.text for chunk in chunks] == ["a", " b", " c"]
        assert [chunk.finish_reason for chunk in chunks] == [None, None, "stop"]

    def test_async_side_by_side(self, server: TritonServer) -> None:
        async def run() -> list[str]:
            async with AsyncTridentClient(server.grpc_url) as client:
                asked = (client.generate(f"one two {i}") for i in range(32))
                return [completion.text for completion in await asyncio.gather(*asked)]

        assert asyncio.run(run()) == [f"one two {i}" for i in range(32)]

    def test_errors_keep_their_code_and_text(self, server: TritonServer) -> None:
        with TridentClient(server.grpc_url) as client:
            with pytest.raises(InvalidRequestError, match=r"^max_tokens: is wrong$") as caught:
                client.generate("!invalid")
            assert (caught.value.code, list(caught.value.params)) == (
                "invalid_value",
                ["max_tokens"],
            )
            assert client.generate("next").text == "next"

    def test_timeout_reaches_the_model(self, server: TritonServer) -> None:
        cancelled = server.log.count("cancelled after")
        with TridentClient(server.grpc_url) as client:
            with pytest.raises(RequestTimeoutError):
                client.generate(LONG, timeout=0.5)
            assert eventually(lambda: server.log.count("cancelled after") == cancelled + 1)

    def test_leaving_a_stream_reaches_the_model(self, server: TritonServer) -> None:
        cancelled = server.log.count("cancelled after")

        async def leave() -> None:
            async with AsyncTridentClient(server.grpc_url) as client:
                async for _ in client.stream(LONG):
                    break
                await asyncio.sleep(0.2)

        asyncio.run(leave())
        with TridentClient(server.grpc_url) as client:
            for _ in client.stream(LONG):
                break
            assert eventually(lambda: server.log.count("cancelled after") == cancelled + 2)

    def test_http_bodies_beyond_the_default_stack(self, server: TritonServer) -> None:
        body = json.dumps({"text_input": "x" * 9_000_000}).encode()
        url = f"http://{server.http_url}/v2/models/ensemble/generate"
        with http.urlopen(http.Request(url, body), timeout=60) as response:
            assert len(json.load(response)["text_output"]) == 9_000_000

    def test_nested_http_bodies_of_the_size_that_the_proxy_takes(
        self, server: TritonServer
    ) -> None:
        proxy = Path(__file__).parents[2] / "docker" / "nginx.conf"
        (mib,) = re.findall(r"client_max_body_size (\d+)m;", proxy.read_text())
        size = int(mib) << 20
        levels = (size - len('{"text_input":}')) // 2
        bodies = (
            b'{"text_input":%b%b}' % (b"[" * levels, b"]" * levels),  # well-formed
            b"[" * size,
        )
        for body in bodies:
            url = f"http://{server.http_url}/v2/models/ensemble/generate"
            with pytest.raises(HTTPError, match=r"HTTP Error (400|500)") as refused:
                http.urlopen(http.Request(url, body), timeout=60)
            refused.value.close()
        with TridentClient(server.grpc_url) as client:
            assert client.generate("next").text == "next"


class TestTritonServer:
    def test_models_run_in_this_environment_with_the_settings(self, server: TritonServer) -> None:
        assert f"loading the script with {Path(sys.executable).parent}/" in server.log
        assert "TRIDENT_MAX_NUM_SEQS=7" in server.log

    def test_metrics_are_served(self, server: TritonServer) -> None:
        with http.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as response:
            assert b"nv_inference_request_success" in response.read()

    def test_a_second_server_on_the_same_port_is_refused(
        self, server: TritonServer, repository: Path
    ) -> None:
        port = server.endpoints["http"].port
        with pytest.raises(ServerStartError, match=f"port {port} .http. is in use"):
            TritonServer(
                {}, repository=repository, ports=0, arguments=[f"--http-port={port}"]
            ).start()

    def test_without_http(self, repository: Path) -> None:
        off = ["--allow-http=false", "--allow-metrics=false"]
        with TritonServer({}, repository=repository, ports=0, arguments=off) as server:
            assert set(server.endpoints) == {"grpc"}
            with TridentClient(server.grpc_url) as client:
                assert client.generate("a").text == "a"

    def test_can_be_started_again_and_its_log_is_removed(self, repository: Path) -> None:
        server = TritonServer({}, repository=repository, ports=0)
        for _ in range(2):
            with server, TridentClient(server.grpc_url) as client:
                assert server.log_path.exists()
                assert client.generate("a").text == "a"
            assert not server.log_path.exists()
            assert "loading the script" in server.log

    def test_slow_start_is_given_up(self, repository: Path) -> None:
        server = TritonServer(
            {},
            repository=repository,
            ports=0,
            start_timeout_s=1,
            environ={**os.environ, "SCRIPT_LOAD_S": "60"},
        )
        with pytest.raises(ServerStartError, match="not ready after 1 s") as caught:
            server.start()
        assert "loading: ensemble:1" in server.log
        assert str(server.log_path) in caught.value.hint
        assert server.log_path.read_text() == server.log

    def test_its_log_is_whole_though_a_stage_says_more_while_it_ends(
        self, repository: Path
    ) -> None:
        environ = {**os.environ, "SCRIPT_LOAD_S": "60"}
        server = TritonServer({}, repository=repository, ports=0, environ=environ)

        def check() -> None:
            if "still loading" in server.log:
                raise ServerStartError("it loads")

        server.launch()
        with pytest.raises(ServerStartError, match="it loads"):
            server.wait_until_ready(check)
        assert server.log_path.read_text() == server.log

    def test_only_this_machine_reaches_it(self, server: TritonServer) -> None:
        listening = {
            connection.laddr.port: connection.laddr.ip.removeprefix("::ffff:")
            for connection in psutil.Process(server.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        for endpoint in server.endpoints.values():
            assert listening[endpoint.port] == "127.0.0.1"


def test_triton_completes_the_configurations_of_other_repositories(server: TritonServer) -> None:
    assert "--disable-auto-complete-config" not in psutil.Process(server.pid).cmdline()


def test_a_stage_that_dies_is_noticed_at_once(repository: Path) -> None:
    with TritonServer(repository=repository, ports=0) as server:
        (stage,) = (
            child
            for child in psutil.Process(server.pid).children()
            if child.name().startswith("triton_python")
        )
        began = time.monotonic()
        assert server.follow(stage.kill) == "the ensemble stage of tritonserver has died"
        assert time.monotonic() - began < 5
    assert server.log_path.exists()
