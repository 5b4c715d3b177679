"""The commands and snippets of the READMEs that need a server, run as they stand."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from client.gateway.settings import GatewaySettings
from engine.launch.server import TritonServer
from tests.factories.readmes import ROOT, Example, examples
from tests.server.gateway.running import running
from tests.test_readmes import SERVER

pytestmark = pytest.mark.server

# What an answer must hold, by a part of what asks for it; the first part found counts.
ANSWERS = {
    "trident run --system": "19",
    "trident run --raw": "Paris",
    'client.stream("Once upon a time", max_tokens=64': "lived",
    "asyncio.gather": "4 + 5 = 9",
    "logprobs=2": "' R'",
    "prompt_logprobs=0": "Paris -",
    '"echo": true': '"prompt_logprobs":"[null,',
    "except InvalidRequestError": "temperature: ",
    "Timeout(total=": "Madrid",
    "client.is_ready()": "True",
    "client.tokenize": "A fox ran",
    '"tokenize": true': '"input_ids":[',
    "grpcs://": "",  # nobody is asked
    "a story about a fox": "fox",
    "trident run": "3, 4, 5, 6, 7, 8, 9",
    "trident chat": "12 + 7 = 19",
    "health --generate": "healthy",
    '"health": true': "ready",
    '"beam_width"': "Rome",
    '"regex"': '"text_output":"12 + 7 = 19"',
    "repository/index": "ensemble",
    "What is 12 + 7?": "19",
    "tritonclient.grpc": "Paris",
    "tritonclient.http": "Paris",
    "from engine import LLM": "Rome",
    "from openai import": "19",
    "/v1/chat/completions": "fox",
    "/v1/embeddings": '"embedding":[',
    "localhost:9000/health/ready": '"status":"ready"',
    "story-1": "abort",
}
KEY = "0123456789abcdef0123"
START_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def demo_server() -> Iterator[TritonServer]:
    environ = {**os.environ, "TRIDENT_ADMIN_KEY": KEY}
    with TritonServer(ports=0, start_timeout_s=120, environ=environ) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(demo_server: TritonServer) -> Iterator[str]:
    settings = GatewaySettings((demo_server.grpc_url,), model_names=("demo", "ensemble"))
    with running(settings) as address:
        yield address


def asking() -> list[Example]:
    """Return what a server is asked."""
    return [
        e
        for e in examples()
        if e.language == "python" or (re.match(SERVER, e.text) and " serve" not in e.text)
    ]


@pytest.mark.parametrize("example", asking(), ids=str)
def test_what_asks_is_answered(demo_server: TritonServer, gateway: str, example: Example) -> None:
    answer = next(answer for part, answer in ANSWERS.items() if part in example.text)
    text = (
        example.text.replace("localhost:8000", demo_server.http_url)
        .replace("localhost:8001", demo_server.grpc_url)
        .replace("localhost:9000", gateway)
    )
    if example.language == "python":
        command = [sys.executable, "-c", text]
    else:
        command = ["bash", "-c", _ours(text)]
    done = subprocess.run(
        command,
        input="What is 12 + 7?\n/exit\n",
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TRIDENT_URL": demo_server.grpc_url,
            "TRIDENT_ADMIN_KEY": KEY,
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert answer in done.stdout


_SERVE = r"(\S+=\S+ )*(\.venv/bin/)?trident serve"  # not below a profiler


def serving() -> list[ParameterSet]:
    """Return the commands that start a server; only the first of the README is run every time."""
    found = [e for e in examples() if e.language == "console" and re.match(_SERVE, e.text)]
    first = next(e for e in found if e.page == "README.md")
    return [
        pytest.param(e, id=str(e), marks=[] if e is first else pytest.mark.large) for e in found
    ]


@pytest.mark.parametrize("example", serving())
def test_a_server_starts(example: Example, tmp_path: Path) -> None:
    words = shlex.split(_ours(example.text))
    # No hub can be reached, and no folder of the user's; ports may be in use.
    words = ["demo" if re.search(r"\bQwen[\d.]+-|^my-", word) else word for word in words]
    words = [word for word in words if word not in ("--http-port", "8080")]
    if "--help" in words:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        assert "--max-num-seqs" in done.stdout
        return
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    with subprocess.Popen([*words, *ports], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        give_up = threading.Timer(START_TIMEOUT_S, process.kill)
        give_up.start()
        try:
            assert process.stdout is not None
            output = ""
            while "Ctrl-C stops the server" not in output:
                line = process.stdout.readline()
                assert line, output
                output += line
            process.send_signal(signal.SIGINT)
            process.communicate()
            assert process.returncode == 0
        finally:
            give_up.cancel()
            process.kill()
    assert "Trident is ready." in output


def _ours(text: str) -> str:
    """Return a command with this environment's `trident` in place of the user's."""
    command = shlex.join([sys.executable, "-m", "client.cli"])
    return re.sub(r"^(\.venv/bin/)?trident\b", command, text)
