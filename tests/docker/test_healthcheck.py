"""docker/healthcheck, with a stand-in for the server."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from engine.launch.ports import pick_free
from tests.docker.files import DOCKER

TOKEN = {"text_output": "x"}
WELL = {"health": "{}"}
DEAD = {"error": "the engine process has died and is being restarted"}
FULL = {"error": "in ensemble 'ensemble', Maximum queue size of 9 requests reached"}
FULL_BEFORE_TOKENIZER = {"error": "in ensemble 'ensemble', Exceeds maximum queue size"}
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
        (FULL_BEFORE_TOKENIZER, WELL, (0, "healthy")),
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


def test_nobody_there() -> None:
    status, text = check(f"http://localhost:{pick_free(1)[0]}")
    assert status == 1
    assert "does not answer" in text
