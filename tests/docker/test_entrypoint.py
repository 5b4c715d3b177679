"""docker/entrypoint: with a stand-in for `trident`, and with the real server."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
import trustme
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine.launch.ports import pick_free
from tests.client.scripted_model import write_repository
from tests.docker.files import DOCKER

ENTRYPOINT = DOCKER / "entrypoint"
KEY = "correct-horse-battery-staple"
PROGRAMS = Path(sys.executable).parent


def run(
    *arguments: str, path: Path, script: Path = ENTRYPOINT, **environ: str
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRIDENT_")}
    environment = {**kept, "PATH": f"{path}:{os.environ['PATH']}", **environ}
    return subprocess.run(
        [script, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


def stand_in(folder: Path, name: str, script: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    stand_in(
        folder, "trident", 'echo "trident $* key=$TRIDENT_ADMIN_KEY file=$TRIDENT_ADMIN_KEY_FILE"'
    )
    return folder


class TestScript:
    def test_arguments_are_those_of_trident_serve(self, programs: Path) -> None:
        done = run("--model", "/models/a b", path=programs)
        assert (done.returncode, done.stdout) == (
            0,
            "trident serve --host 0.0.0.0 --model /models/a b key= file=\n",
        )

    def test_another_program(self, programs: Path) -> None:
        assert run("echo", "hello  there", path=programs).stdout == "hello  there\n"

    def test_key_from_a_file(self, programs: Path, tmp_path: Path) -> None:
        secret = tmp_path / "key"
        secret.write_text(f"{KEY}\n")
        done = run(path=programs, TRIDENT_ADMIN_KEY_FILE=str(secret))
        assert done.stdout == f"trident serve --host 0.0.0.0 key={KEY} file=\n"

    def test_key_file_that_is_none(self, programs: Path, tmp_path: Path) -> None:
        empty = tmp_path / "empty"
        empty.touch()
        for path, words in ((tmp_path / "gone", "cannot read"), (empty, "is empty")):
            done = run(path=programs, TRIDENT_ADMIN_KEY_FILE=str(path))
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.startswith("trident: TRIDENT_ADMIN_KEY_FILE: ")
            assert words in done.stderr

    def test_two_keys(self, programs: Path) -> None:
        done = run(path=programs, TRIDENT_ADMIN_KEY=KEY, TRIDENT_ADMIN_KEY_FILE="/x")
        assert done.returncode == 1
        assert "not both" in done.stderr
        assert KEY not in done.stderr

    @pytest.mark.parametrize(("mib", "warned"), [(64, True), (256, False), (1024, False)])
    def test_little_shared_memory_is_told(self, programs: Path, mib: int, warned: bool) -> None:
        stand_in(programs, "df", f"printf '1M-blocks\\n%9d\\n' {mib}")
        done = run(path=programs)
        assert done.returncode == 0
        assert ("--shm-size" in done.stderr) is warned

    def test_the_launcher_of_kernels_gets_into_the_cache_once(
        self, programs: Path, tmp_path: Path
    ) -> None:
        script = shutil.copy(ENTRYPOINT, programs)
        built = tmp_path / "launcher" / "KEY" / "cuda_utils.so"
        built.parent.mkdir(parents=True)
        built.write_text("new")
        cache = tmp_path / "cache"
        for _ in range(2):
            run(path=programs, script=script, TRITON_CACHE_DIR=str(cache))
            assert [path.name for path in cache.iterdir()] == ["KEY"]
            assert (cache / "KEY" / "cuda_utils.so").read_text() == "new"
            built.write_text("of another image")

    def test_a_cache_that_cannot_be_written_to(self, programs: Path, tmp_path: Path) -> None:
        script = shutil.copy(ENTRYPOINT, programs)
        (tmp_path / "launcher" / "KEY").mkdir(parents=True)
        (tmp_path / "cache").touch()
        done = run(path=programs, script=script, TRITON_CACHE_DIR=str(tmp_path / "cache"))
        assert done.returncode == 0
        assert "cannot write to" in done.stderr
        assert done.stdout.startswith("trident serve")


class Container:
    """What `docker run` would start, with what it would give it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        authority = trustme.CA()
        self.client = authority.issue_cert("client@localhost")
        issued = authority.issue_cert("localhost")
        issued.cert_chain_pems[0].write_to_path(folder / "server.crt")
        issued.private_key_pem.write_to_path(folder / "server.key")
        self.client.cert_chain_pems[0].write_to_path(folder / "client.crt")
        self.client.private_key_pem.write_to_path(folder / "client.key")
        authority.cert_pem.write_to_path(folder / "ca.crt")
        (folder / "key").write_text(KEY)
        self.authority = authority.cert_pem.bytes()
        self.http, self.grpc, self.metrics = pick_free(3)
        self.process = subprocess.Popen(
            [
                ENTRYPOINT,
                *(f"--model-repository={write_repository(folder / 'repository')}",),
                *(f"--http-port={self.http}", f"--grpc-port={self.grpc}"),
                f"--metrics-port={self.metrics}",
                "--openai-port=0",
            ],
            env={
                **os.environ,
                "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
                "TMPDIR": str(folder),
                "XDG_STATE_HOME": str(folder),
                "TRIDENT_ADMIN_KEY_FILE": str(folder / "key"),
                "TRIDENT_SSL_CERTFILE": str(folder / "server.crt"),
                "TRIDENT_SSL_KEYFILE": str(folder / "server.key"),
                "TRIDENT_SSL_CA_CERTS": str(folder / "ca.crt"),
                "TRIDENT_TLS_CA": str(folder / "ca.crt"),
                "TRIDENT_TLS_CERT": str(folder / "client.crt"),
                "TRIDENT_TLS_KEY": str(folder / "client.key"),
                "TRIDENT_TLS_NAME": "localhost",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if "Ctrl-C stops" in line:
                return
        raise AssertionError(self.output)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        url = f"http://localhost:{self.http}{path}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, body, headers), timeout=60
            ) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def is_live(self, credentials: grpc.ChannelCredentials | None) -> bool:
        address = f"localhost:{self.grpc}"
        open_channel: Callable[[], grpc.Channel] = (
            (lambda: grpc.insecure_channel(address))
            if credentials is None
            else (lambda: grpc.secure_channel(address, credentials))
        )
        with open_channel() as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                return stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=5).live
            except grpc.RpcError:
                return False


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    container = Container(tmp_path_factory.mktemp("container"))
    try:
        container.wait_until_ready()
        yield container
    finally:
        container.process.terminate()
        container.process.communicate(timeout=60)


@pytest.mark.server
class TestServer:
    def test_the_key_opens_administration(self, container: Container) -> None:
        index = "/v2/repository/index"
        assert container.post(index, b"{}", {})[0] == 403
        assert container.post(index, b"{}", {"admin-key": KEY[:-1]})[0] == 403
        assert container.post(index, b"{}", {"admin-key": KEY})[0] == 200

    def test_the_key_is_told_to_nobody(self, container: Container) -> None:
        assert "wants the header admin-key" in container.output
        assert KEY not in container.output
        (log,) = container.folder.glob("trident/*.log")
        assert KEY not in log.read_text()

    def test_a_body_beyond_the_usual_stack(self, container: Container) -> None:
        body = json.dumps({"text_input": "x" * 10_000_000}).encode()
        status, answer = container.post("/v2/models/ensemble/generate", body, {})
        assert (status, len(json.loads(answer)["text_output"])) == (200, 10_000_000)

    def test_tls_with_a_client_certificate(self, container: Container) -> None:
        key = container.client.private_key_pem.bytes()
        chain = container.client.cert_chain_pems[0].bytes()
        known = grpc.ssl_channel_credentials(container.authority, key, chain)
        assert container.is_live(known)
        assert "with TLS" in container.output

    def test_tls_refuses_others(self, container: Container) -> None:
        assert not container.is_live(None)
        assert not container.is_live(grpc.ssl_channel_credentials(container.authority))
        stranger = trustme.CA().issue_cert("client@localhost")
        key, chain = stranger.private_key_pem.bytes(), stranger.cert_chain_pems[0].bytes()
        assert not container.is_live(grpc.ssl_channel_credentials(container.authority, key, chain))

    def test_the_gateway_has_one(self, container: Container) -> None:
        (address,) = re.findall(r"OpenAI +(http://\S+)", container.output)
        asked = json.dumps({"prompt": "a fox"}).encode()
        request = urllib.request.Request(
            f"{address}/completions", asked, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert "fox" in json.load(response)["choices"][0]["text"]

    def test_the_health_check_needs_no_certificate(self, container: Container) -> None:
        command = [sys.executable, DOCKER / "healthcheck", f"http://localhost:{container.http}"]
        assert subprocess.run(command, timeout=60, stdout=subprocess.DEVNULL).returncode == 0

    def test_the_health_check_finds_the_port(self, container: Container, tmp_path: Path) -> None:
        """In a container there are its processes only."""
        (server,) = (
            child
            for child in psutil.Process(container.process.pid).children(recursive=True)
            if child.name() == "tritonserver"
        )
        (tmp_path / str(server.pid)).symlink_to(f"/proc/{server.pid}")
        find = runpy.run_path(str(DOCKER / "healthcheck"))["running_server"]
        assert find(tmp_path) == (f"http://localhost:{container.http}", "ensemble")

    def test_sigterm_ends_it_cleanly(self, container: Container) -> None:
        """Must be the last."""
        container.process.send_signal(signal.SIGTERM)
        output, _ = container.process.communicate(timeout=60)
        assert container.process.returncode == 0, output
        assert not list(container.folder.glob("trident-*"))
        assert not list(container.folder.glob("trident/*"))
