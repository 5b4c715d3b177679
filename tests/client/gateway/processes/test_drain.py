"""SIGTERM: answers in flight are finished or end with an error, and nobody else is let in."""

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
from contextlib import contextmanager

import psutil
import pytest

from engine.launch.ports import pick_free
from tests.client.fake_triton import FakeTriton, Piece
from tests.waiting import eventually

WORDS = [f"w{i} " for i in range(20)]
END = Piece({0: ""}, finished=(0,), final=True)
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "a"}]
ENDING = "the gateway is shutting down"
# Of each API: its route, a request, the event of an error, and what comes after that.
STREAMS = {
    "completions": ({"prompt": "a"}, b"", b"data: [DONE]"),
    "chat/completions": ({"messages": MESSAGES}, b"", b"data: [DONE]"),
    "responses": ({"input": "a"}, b"event: error", b"data: [DONE]"),
    "messages": (
        {"messages": MESSAGES, "model": "ensemble", "max_tokens": 9},
        b"event: error",
        b"",
    ),
}


@pytest.fixture
def gateway(triton: FakeTriton) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    triton.pieces = [*(Piece({0: word}, delay_s=0.05) for word in WORDS), END]
    with _running(triton) as started:
        yield started


@contextmanager
def _running(triton: FakeTriton, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    (port,) = pick_free(1)
    command = [sys.executable, "-m", "client.cli", "gateway", "--port", str(port), *arguments]
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
    assert eventually(lambda: _is_open(port), 30)


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


@pytest.fixture
def held(triton: FakeTriton) -> Iterator[None]:
    """Answers stay at their first word."""
    triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, held=True), END]
    triton.go_on.clear()
    yield
    triton.go_on.set()


def _asked(port: int, route: str, body: dict[str, object]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", f"/v1/{route}", json.dumps(body), JSON)
    return connection


@pytest.mark.parametrize("workers", [1, 2])
def test_streams_that_take_too_long_end_with_an_error_event(
    triton: FakeTriton, held: None, workers: int
) -> None:
    arguments = ("--shutdown-timeout", "0.3", "--workers", str(workers))
    with _running(triton, *arguments) as (process, port):
        asked = [_asked(port, r, b | {"stream": True}) for r, (b, _, _) in STREAMS.items()]
        streams = [connection.getresponse() for connection in asked]
        for stream in streams:
            assert stream.readline()  # it has begun
        whole = _asked(port, "completions", {"prompt": "a"})
        time.sleep(0.2)  # so that it is in flight too
        os.kill(process.pid, signal.SIGTERM)
        for (_, kind, last), stream in zip(STREAMS.values(), streams, strict=True):
            lines = [line for line in stream.read().splitlines() if line]
            assert lines[-1] == last or not last
            (told,) = [i for i, line in enumerate(lines) if ENDING.encode() in line][:1]
            assert lines[told - 1] == kind or not kind
        answer = whole.getresponse()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert ENDING in json.load(answer)["error"]["message"]
        assert process.wait(20) in (0, -signal.SIGTERM)
        for connection in (*asked, whole):
            connection.close()


def test_a_client_that_does_not_read_keeps_no_gateway_alive(triton: FakeTriton) -> None:
    triton.pieces = [*(Piece({0: "x" * 100_000}) for _ in range(400)), END]
    with _running(triton, "--shutdown-timeout", "0.3") as (process, port):
        deaf = _asked(port, "completions", {"prompt": "a", "stream": True})
        time.sleep(0.5)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)
        deaf.close()


def test_a_worker_that_hangs_keeps_no_gateway_alive(triton: FakeTriton) -> None:
    with _running(triton, "--shutdown-timeout", "0", "--workers", "2") as (process, _):
        workers = psutil.Process(process.pid).children()
        workers[0].suspend()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)
        assert not psutil.wait_procs(workers, 5)[1]
