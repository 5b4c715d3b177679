"""docker/healthcheck, with a stand-in for the server."""

import json
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from engine.launch.ports import pick_free
from tests.docker.files import DOCKER

TOKEN = {"text_output": "x"}
WELL = {"health": "{}"}
DEAD = {"error": "the engine process has died and is being restarted"}
FULL = {"error": "in ensemble 'ensemble', Maximum queue size of 9 requests reached"}
FULL_OF_TRITON = {"error": "in ensemble 'ensemble', Exceeds maximum queue size"}
LATE = None


class Server:
    """Answers each model with what the test says."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, str] | None] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                model = self.path.split("/")[3]
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked.append((model, json.loads(body)))
                answer = outer.answers[model]
                if answer is None:
                    time.sleep(6)
                    return
                data = json.dumps(answer).encode()
                self.send_response(400 if "error" in answer else 200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("localhost", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://localhost:{self.http.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def check(url: str) -> tuple[int, str]:
    command = [sys.executable, DOCKER / "healthcheck", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("token", "health", "result"),
    [
        (TOKEN, DEAD, (0, "healthy")),
        (DEAD, WELL, (1, DEAD["error"])),
        (FULL, WELL, (0, "healthy")),
        (FULL_OF_TRITON, WELL, (0, "healthy")),
        (FULL, DEAD, (1, DEAD["error"])),
    ],
)
def test_what_the_server_says(
    server: Server, token: Any, health: Any, result: tuple[int, str]
) -> None:
    server.answers = {"ensemble": token, "engine": health}
    assert check(server.url) == result
    model, body = server.asked[0]
    assert (model, body["max_tokens"]) == ("ensemble", 1)


@pytest.mark.slow
@pytest.mark.parametrize(("health", "status"), [(WELL, 0), (DEAD, 1)])
def test_a_token_that_does_not_come_in_time(server: Server, health: Any, status: int) -> None:
    server.answers = {"ensemble": LATE, "engine": health}
    assert check(server.url)[0] == status


def test_a_proxy_is_not_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, f"http://localhost:{pick_free(1)[0]}")
    server.answers = {"ensemble": TOKEN}
    assert check(server.url) == (0, "healthy")


class TestRunningServer:
    """Where the server listens is read from its process."""

    @pytest.fixture
    def found(self, tmp_path: Path) -> Callable[..., tuple[str, str] | None]:
        module = runpy.run_path(str(DOCKER / "healthcheck"))

        def find(*arguments: str, environ: str = "") -> tuple[str, str] | None:
            for number, command in {
                "1": ["/opt/trident/bin/python", "/opt/trident/bin/trident", "serve"],
                "7": list(arguments),
                "self": ["python"],
            }.items():
                (tmp_path / number).mkdir()
                (tmp_path / number / "cmdline").write_bytes("\0".join(command).encode() + b"\0")
                (tmp_path / number / "environ").write_text(environ)
            (tmp_path / "8").mkdir()  # one that has ended meanwhile
            where: tuple[str, str] | None = module["running_server"](tmp_path)
            return where

        return find

    @pytest.mark.parametrize(
        ("arguments", "url"),
        [
            (["--http-port=9000", "--http-address=0.0.0.0"], "http://localhost:9000"),
            (["--http-port=1", "--http-port=2"], "http://localhost:2"),
            (["--http-port=9000", "--http-address=10.1.2.3"], "http://10.1.2.3:9000"),
            (["--http-port=9000", "--http-address=::1"], "http://[::1]:9000"),
            (["--allow-http=false", "--grpc-port=9001"], ""),
        ],
    )
    def test_url(
        self, found: Callable[..., tuple[str, str] | None], arguments: list[str], url: str
    ) -> None:
        assert found("/opt/tritonserver/bin/tritonserver", *arguments) == (url, "ensemble")

    def test_name_of_the_model(self, found: Callable[..., tuple[str, str] | None]) -> None:
        environ = "A=b\0TRIDENT_SERVED_MODEL_NAME=llama\0"
        running = found("tritonserver", "--http-port=1", environ=environ)
        assert running == ("http://localhost:1", "llama")

    def test_none(self, found: Callable[..., tuple[str, str] | None]) -> None:
        assert found("python", "tritonserver", "--http-port=1") is None


def test_nobody_there() -> None:
    status, text = check(f"http://localhost:{pick_free(1)[0]}")
    assert status == 1
    assert "does not answer" in text
