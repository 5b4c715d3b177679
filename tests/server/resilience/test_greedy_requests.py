"""Requests that would take more of the gateway than they have themselves, beside good streams.

Each is compared with a plain request of the same size: the longest pause of the streams, and the
memory of the gateway's process.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from client.gateway.security.body_limits import MAX_BUFFERED_BYTES
from engine.launch.ports import pick_free
from engine.launch.server import TritonServer
from tests.waiting import eventually

MIB = 2**20
MAX_GROWTH = 100 * MIB
NUM_STREAMS = 4
USER = {"role": "user", "content": "a"}
COUNTED = {"model": "ensemble"}


class Gateway:
    """A gateway in a process of its own, and streams through it that never end."""

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self._proc = Path(f"/proc/{pid}")
        self._pauses = [0.0] * NUM_STREAMS
        self._is_ending = False
        self._threads = [
            threading.Thread(target=self._stream, args=(number,)) for number in range(NUM_STREAMS)
        ]

    def start(self) -> None:
        """Start the streams."""
        for each in self._threads:
            each.start()

    def end(self) -> None:
        """End the streams."""
        self._is_ending = True
        for each in self._threads:
            each.join(60)

    def ask(self, path: str, body: Any) -> tuple[int, bytes]:
        """Return status and answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            headers = {"content-type": "application/json"}
            connection.request("POST", path, content, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def cost(self, action: Callable[[], object]) -> tuple[float, int]:
        """Return the longest pause of the streams, and how much the process grows at most."""
        (self._proc / "clear_refs").write_text("5")  # the peak begins anew
        before = self._memory("VmRSS")
        self._pauses = [0.0] * NUM_STREAMS
        action()
        time.sleep(0.2)
        return max(self._pauses), self._memory("VmHWM") - before

    def _memory(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", (self._proc / "status").read_text())
        assert found
        return int(found[1]) * 1024

    def _stream(self, number: int) -> None:
        body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True}
        while not self._is_ending:
            with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as peer:
                headers = {"content-type": "application/json"}
                peer.request("POST", "/v1/completions", json.dumps(body), headers)
                answer, last = peer.getresponse(), time.monotonic()
                assert answer.status == 200
                while answer.readline() and not self._is_ending:
                    now = time.monotonic()
                    self._pauses[number] = max(self._pauses[number], now - last)
                    last = now


@pytest.fixture(scope="module")
def gateway(resilient: TritonServer) -> Iterator[Gateway]:
    (port,) = pick_free(1)
    command = [sys.executable, "-m", "client.cli", "gateway", "--port", str(port)]
    with subprocess.Popen([*command, "--triton-url", resilient.grpc_url]) as process:
        try:
            assert eventually(lambda: _is_open(port))
            made = Gateway(port, process.pid)
            made.start()
            yield made
            made.end()
            process.terminate()  # what the streams had is taken back
            process.wait(60)
        finally:
            process.kill()


def _is_open(port: int) -> bool:
    with socket.socket() as peer:
        return peer.connect_ex(("127.0.0.1", port)) == 0


def is_harmless(gateway: Gateway, greedy: Callable[[], object], plain: Callable[[], object]) -> str:
    """Return what is wrong; "" if nothing is. Another program may have had the processors once."""
    plain()  # what grows once is no other's
    for _ in range(3):
        allowed, _growth = gateway.cost(plain)
        pause, growth = gateway.cost(greedy)
        if growth > MAX_GROWTH:
            return f"grows by {growth // MIB} MiB"
        if pause <= 2 * allowed + 0.3:
            return ""
    return f"a pause of {pause:.2f} s beside {allowed:.2f} s"


def text(size: int) -> str:
    return "some plain text. " * (size // 17)


@pytest.mark.server
@pytest.mark.parametrize("count", [160_000, 16_000])
def test_many_references_to_one_item_harm_nobody(gateway: Gateway, count: int) -> None:
    stored = {"input": text(2_000), "store": True, "max_output_tokens": 1}
    status, answer = gateway.ask("/v1/responses", stored)
    assert status == 200
    body = json.dumps({"input": [{"id": json.loads(answer)["output"][0]["id"]}] * count}).encode()
    plain = json.dumps({"input": text(len(body))}).encode()

    def ask(content: bytes) -> None:
        assert gateway.ask("/v1/responses", content)[0] == 400

    assert is_harmless(gateway, lambda: ask(body), lambda: ask(plain)) == ""


@pytest.mark.server
def test_many_prompts_with_a_large_field_harm_nobody(gateway: Gateway) -> None:
    body = json.dumps({"prompt": ["a"] * 128, "max_tokens": 1, "stop": "a" * 4_000_000}).encode()
    plain = json.dumps({"prompt": text(4_000_000)}).encode()

    def ask(content: bytes) -> None:
        assert gateway.ask("/v1/completions", content)[0] == 400

    assert is_harmless(gateway, lambda: ask(body), lambda: ask(plain)) == ""


@pytest.mark.server
@pytest.mark.parametrize("is_one", [True, False])
def test_many_thoughts_harm_nobody(gateway: Gateway, is_one: bool) -> None:
    thought = {"type": "thinking", "thinking": "a thought of a few words"}
    turns = [{"role": "assistant", "content": [thought] * 62_000}]
    if not is_one:
        turns = [{"role": "assistant", "content": [thought]}] * 21_000
    body = json.dumps({**COUNTED, "messages": [USER, *turns, USER]}).encode()
    plain = json.dumps({**COUNTED, "messages": [{**USER, "content": text(len(body))}]}).encode()
    path = "/v1/messages/count_tokens"
    assert (
        is_harmless(gateway, lambda: gateway.ask(path, body), lambda: gateway.ask(path, plain))
        == ""
    )


@pytest.mark.server
def test_log_probabilities_of_many_prompts_harm_nobody(gateway: Gateway) -> None:
    body = {"prompt": [text(1_400)] * 20, "max_tokens": 1, "prompt_logprobs": 20}
    plain = {**body, "prompt_logprobs": 0}  # with these no prompt comes from the cache

    def greedy() -> None:
        status, answer = gateway.ask("/v1/completions", body)
        assert (status, json.loads(answer)["error"]["param"]) == (400, "prompt_logprobs")

    assert is_harmless(gateway, greedy, lambda: gateway.ask("/v1/completions", plain)) == ""


@pytest.mark.server
def test_unfinished_bodies_are_bounded_together(gateway: Gateway) -> None:
    size = 9 * MIB
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n".encode()
    most = MAX_BUFFERED_BYTES // size + 1
    with ExitStack() as peers:

        def greedy() -> None:
            refused = 0
            for _ in range(60):
                peer = peers.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
                peer.sendall(head + b"x" * (size - 1))
                peer.settimeout(0.05)
                with suppress(TimeoutError):  # else it is waited for
                    refused += peer.recv(100).startswith(b"HTTP/1.1 503 ")
            assert refused >= 60 - most - 2

        _pause, growth = gateway.cost(greedy)
        assert growth < MAX_BUFFERED_BYTES + MAX_GROWTH
        status, answer = gateway.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert status == 200, answer  # small requests are let in
