"""SIGTERM: answers in flight are finished, and nobody else is let in."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from engine.launch.ports import pick_free
from tests.client.fake_triton import FakeTriton, Piece

WORDS = [f"w{i} " for i in range(20)]


@pytest.fixture
def gateway(triton: FakeTriton) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    triton.pieces = [Piece({0: word}, delay_s=0.05) for word in WORDS]
    triton.pieces.append(Piece({0: ""}, finished=(0,), final=True))
    (port,) = pick_free(1)
    command = [sys.executable, "-m", "client.cli", "gateway", "--port", str(port)]
    with subprocess.Popen([*command, "--triton-url", triton.url]) as process:
        try:
            _wait_until_open(port)
            yield process, port
        finally:
            process.kill()


def _is_open(port: int) -> bool:
    with socket.socket() as peer:
        return peer.connect_ex(("127.0.0.1", port)) == 0


def _wait_until_open(port: int) -> None:
    deadline = time.monotonic() + 30
    while not _is_open(port):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_stream_is_not_lost(gateway: tuple[subprocess.Popen[bytes], int]) -> None:
    process, port = gateway
    streaming, idle = (http.client.HTTPConnection("127.0.0.1", port, timeout=30) for _ in range(2))
    idle.request("GET", "/health")
    idle.getresponse().read()
    body = json.dumps({"prompt": "a", "stream": True})
    streaming.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = streaming.getresponse()
    lines = [answer.readline()]
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert not _is_open(port)
    assert process.poll() is None
    lines += answer.read().splitlines(keepends=True)
    events = [line.removeprefix(b"data: ") for line in lines if line.strip()]
    assert events[-1].strip() == b"[DONE]"
    texts = [choice["text"] for e in events[:-1] for choice in json.loads(e)["choices"]]
    assert "".join(texts) == "".join(WORDS)
    assert process.wait(60) in (0, -signal.SIGTERM)
    streaming.close()
    idle.close()
