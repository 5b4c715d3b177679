"""The launcher and the clients with the real tritonserver, on a scripted model repository."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib import request as http

import psutil
import pytest

from client import AsyncTridentClient, TridentClient, cli
from client.errors import InvalidRequestError, RequestTimeoutError
from engine.launch import stage_watch
from engine.launch.environment import RUN_ID
from engine.launch.errors import ServerStartError, StageDiedError
from engine.launch.server import TritonServer
from tests.client.scripted_model import write_repository

pytestmark = pytest.mark.server

ROOT = Path(cli.__file__).parents[1]
LONG = " ".join(["word"] * 3000)


def _eventually(condition: Callable[[], object], seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("repository"))


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
            with pytest.raises(InvalidRequestError, match=r"^max_tokens: is wrong$"):
                client.generate("!invalid")
            assert client.generate("next").text == "next"

    def test_timeout_reaches_the_model(self, server: TritonServer) -> None:
        cancelled = server.log.count("cancelled after")
        with TridentClient(server.grpc_url) as client:
            with pytest.raises(RequestTimeoutError):
                client.generate(LONG, timeout=0.5)
            assert _eventually(lambda: server.log.count("cancelled after") == cancelled + 1)

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
            assert _eventually(lambda: server.log.count("cancelled after") == cancelled + 2)

    def test_http_bodies_beyond_the_default_stack(self, server: TritonServer) -> None:
        body = json.dumps({"text_input": "x" * 9_000_000}).encode()
        url = f"http://{server.http_url}/v2/models/ensemble/generate"
        with http.urlopen(http.Request(url, body), timeout=60) as response:
            assert len(json.load(response)["text_output"]) == 9_000_000


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

    def test_can_be_started_again(self, repository: Path) -> None:
        server = TritonServer({}, repository=repository, ports=0)
        for _ in range(2):
            with server, TridentClient(server.grpc_url) as client:
                assert client.generate("a").text == "a"

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

    def test_the_log_of_a_server_that_was_stopped_is_removed(self, repository: Path) -> None:
        with TritonServer(repository=repository, ports=0) as server:
            assert server.log_path.exists()
        assert not server.log_path.exists()
        assert "loading the script" in server.log

    def test_only_this_machine_reaches_it(self, server: TritonServer) -> None:
        listening = {
            connection.laddr.port: connection.laddr.ip.removeprefix("::ffff:")
            for connection in psutil.Process(server.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        for endpoint in server.endpoints.values():
            assert listening[endpoint.port] == "127.0.0.1"


class Launcher:
    """`trident serve` as a process of its own, in a temporary directory of its own."""

    def __init__(self, repository: Path, folder: Path, *arguments: str, **environ: str) -> None:
        self._folder = folder
        ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
        self.process = subprocess.Popen(
            [
                *[sys.executable, "-m", "client.cli", "serve", *ports, *arguments],
                *["--model-repository", str(repository)],
            ],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(folder), "XDG_STATE_HOME": str(folder), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, text: str) -> str:
        """Return what it printed up to the line with `text`."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line)
            if text in line:
                return "".join(lines)
        raise AssertionError("".join(lines))

    def run_id(self) -> str:
        (path,) = self._folder.glob("trident-*")
        return path.name

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Send a signal, wait for the end, return the exit status and the rest of the output."""
        if number is not None:
            self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output


def _processes(run_id: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_ID) == run_id:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _nothing_left(run_id: str, folder: Path) -> bool:
    regions = list(Path("/dev/shm").glob(f"{run_id}*"))
    return not (_processes(run_id) or regions or list(folder.glob("trident-*")))


def _kept_log(output: str, folder: Path) -> str:
    """Return the content of the log that `output` names, the only one that is left."""
    (named,) = re.findall(r"^ *log: (.+)$", output, re.MULTILINE)
    assert list((folder / "trident").iterdir()) == [Path(named)]
    return Path(named).read_text()


@pytest.fixture
def launch(repository: Path, tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    launched: list[Launcher] = []

    def start(*arguments: str, **environ: str) -> Launcher:
        launched.append(Launcher(repository, tmp_path, *arguments, **environ))
        return launched[-1]

    yield start
    for each in launched:
        if each.process.poll() is None:
            each.end(signal.SIGTERM)
        assert each.process.stdout is not None
        each.process.stdout.close()


class TestServeCommand:
    def test_printed_curl_line_works_and_sigterm_ends_it_cleanly(
        self, launch: Callable[..., Launcher], tmp_path: Path
    ) -> None:
        launcher = launch()
        output = launcher.wait_for("Ctrl-C stops")
        assert "Trident is ready. ready: script, KV cache for 0 tokens" in output
        assert "Administration is closed; to open it, set TRIDENT_ADMIN_KEY" in output
        (curl,) = re.findall(r"^curl .*$", output, re.MULTILINE)
        assert shutil.which("curl"), "curl is needed to try the line"
        answer = subprocess.run(curl, shell=True, capture_output=True, check=True, text=True)
        assert "fox" in json.loads(answer.stdout)["text_output"]
        run_id = launcher.run_id()
        assert _processes(run_id)
        status, rest = launcher.end(signal.SIGTERM)
        assert status == 0, rest
        assert _nothing_left(run_id, tmp_path)
        assert not list((tmp_path / "trident").iterdir())

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_interrupted_while_loading(
        self, launch: Callable[..., Launcher], tmp_path: Path, number: signal.Signals
    ) -> None:
        launcher = launch(SCRIPT_LOAD_S="60")
        launcher.wait_for("loading the script")
        run_id = launcher.run_id()
        status, _ = launcher.end(number)
        assert status == 130
        assert _nothing_left(run_id, tmp_path)

    def test_model_that_cannot_load(self, launch: Callable[..., Launcher], tmp_path: Path) -> None:
        launcher = launch(SCRIPT_FAIL="/m: config.json is missing")
        status, output = launcher.end()
        assert status == 1
        assert "trident: /m: config.json is missing\n  --model takes a folder" in output
        assert not list(tmp_path.glob("trident-*"))
        assert "config.json is missing" in _kept_log(output, tmp_path)

    def test_flag_that_tritonserver_does_not_know(self, launch: Callable[..., Launcher]) -> None:
        status, output = launch("--frobnicate=3").end()
        assert status == 1
        assert "trident: unrecognized option '--frobnicate=3'" in output

    def test_tritonserver_that_dies_later(
        self, launch: Callable[..., Launcher], tmp_path: Path
    ) -> None:
        launcher = launch()
        launcher.wait_for("Ctrl-C stops")
        run_id = launcher.run_id()
        (server,) = (p for p in _processes(run_id) if p.name() == "tritonserver")
        server.kill()
        status, output = launcher.end()
        assert status == 1
        assert "tritonserver died" in output
        assert _nothing_left(run_id, tmp_path)
        assert "loading the script" in _kept_log(output, tmp_path)

    def test_killed_launcher_takes_the_server_with_it(
        self, launch: Callable[..., Launcher], tmp_path: Path
    ) -> None:
        launcher = launch()
        launcher.wait_for("Ctrl-C stops")
        run_id = launcher.run_id()
        launcher.end(signal.SIGKILL)
        assert _eventually(lambda: not _processes(run_id))
        assert "loading the script" in (tmp_path / "trident" / f"{run_id}.log").read_text()
        # What else remains in the file system goes with the next start.
        again = launch(SCRIPT_FAIL="no")
        again.end()
        assert _nothing_left(run_id, tmp_path)


def test_triton_completes_the_configurations_of_other_repositories_only(
    server: TritonServer,
) -> None:
    flag = "--disable-auto-complete-config"
    assert flag not in psutil.Process(server.pid).cmdline()
    with TritonServer(ports=0) as own:
        assert flag in psutil.Process(own.pid).cmdline()


def test_a_stage_that_dies_is_noticed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_watch, "_GRACE_S", 0.5)
    with TritonServer(repository=repository, ports=0) as server:
        stages = [
            child
            for child in psutil.Process(server.pid).children()
            if child.name().startswith("triton_python")
        ]
        stages[0].kill()
        with pytest.raises(StageDiedError, match="a model stage of tritonserver has died"):
            server.follow()
    assert server.log_path.exists()
