"""The examples of the README, run as they stand against a server on the bundled model."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.launch.server import TritonServer

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def demo_server() -> Iterator[TritonServer]:
    with TritonServer(ports=0, start_timeout_s=120) as server:
        yield server


def blocks(language: str, containing: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    chosen = [block for block in found if containing in block]
    assert chosen, f"the README has no {language} block with {containing!r}"
    return chosen


def run(command: list[str]) -> str:
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def at(server: TritonServer, text: str) -> str:
    return text.replace("localhost:8000", server.http_url).replace(
        "localhost:8001", server.grpc_url
    )


def test_curl_streams_a_story(demo_server: TritonServer) -> None:
    (block,) = blocks("console", "curl -N")
    out = run(shlex.split(at(demo_server, block.removeprefix("$ "))))
    events = [line for line in out.splitlines() if line.startswith("data: ")]
    assert len(events) > 20
    assert all('"text_output"' in event for event in events)


@pytest.mark.parametrize(
    ("which", "answer"),
    [("from client import TridentClient", "19"), ("import tritonclient.grpc", "Paris")],
)
def test_python_clients(demo_server: TritonServer, which: str, answer: str) -> None:
    (block,) = blocks("python", which)
    assert answer in run([sys.executable, "-c", at(demo_server, block)])


def test_the_command_line(demo_server: TritonServer) -> None:
    (block,) = blocks("console", "trident run")
    first = block.splitlines()[0].removeprefix("$ .venv/bin/trident ")
    main = "from client.cli import main; main()"
    url = ["--url", demo_server.grpc_url]
    out = run([sys.executable, "-c", main, *shlex.split(first), *url])
    assert "3, 4, 5, 6, 7, 8, 9" in out


def test_offline() -> None:
    (block,) = blocks("python", "from engine import LLM")
    assert "Rome" in run([sys.executable, "-c", block])
