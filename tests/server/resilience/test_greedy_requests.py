"""Requests that would take more of the gateway than they have themselves, beside good streams.

Each is compared with a plain request of the same size: the longest pause of the streams, and the
memory of the gateway's process.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from client.gateway.security.body_limits import MAX_BUFFERED_BYTES
from engine.launch.ports import pick_free
from engine.launch.server import TritonServer
from tests.server.resilience.gaps import (
    MAX_GROWTH,
    MAX_WAIT_S,
    MIB,
    Gateway,
    cancel_seconds,
    compare,
    longest_wait,
)
from tests.server.resilience.hostile_bodies import plain_text, unfollowable
from tests.waiting import eventually

USER = {"role": "user", "content": "a"}
COUNTED = {"model": "ensemble"}


@pytest.fixture(scope="module")
def gateway(resilient: TritonServer) -> Iterator[Gateway]:
    (port,) = pick_free(1)
    command = [sys.executable, "-m", "client.cli", "gateway", "--port", str(port)]
    with subprocess.Popen([*command, "--triton-url", resilient.grpc_url]) as process:
        try:
            assert eventually(lambda: _is_open(port))
            made = Gateway(port, process.pid, num_streams=4)
            with made.streaming():
                yield made
            process.terminate()  # what the streams had is taken back
            process.wait(60)
        finally:
            process.kill()


def _is_open(port: int) -> bool:
    with socket.socket() as peer:
        return peer.connect_ex(("127.0.0.1", port)) == 0


def is_harmless(gateway: Gateway, greedy: Callable[[], object], plain: Callable[[], object]) -> str:
    """Return what is wrong; "" if nothing is."""
    return compare(gateway, greedy, plain)[-1]


@pytest.mark.server
@pytest.mark.parametrize("count", [160_000, 16_000])
def test_many_references_to_one_item_harm_nobody(gateway: Gateway, count: int) -> None:
    stored = {"input": plain_text(2_000), "store": True, "max_output_tokens": 1}
    status, answer = gateway.ask("/v1/responses", stored)
    assert status == 200
    body = json.dumps({"input": [{"id": json.loads(answer)["output"][0]["id"]}] * count}).encode()
    plain = json.dumps({"input": plain_text(len(body))}).encode()

    def ask(content: bytes) -> None:
        assert gateway.ask("/v1/responses", content)[0] == 400

    assert is_harmless(gateway, lambda: ask(body), lambda: ask(plain)) == ""


@pytest.mark.server
def test_many_prompts_with_a_large_field_harm_nobody(gateway: Gateway) -> None:
    body = json.dumps({"prompt": ["a"] * 128, "max_tokens": 1, "stop": "a" * 4_000_000}).encode()
    plain = json.dumps({"prompt": plain_text(4_000_000)}).encode()

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
    messages = [{**USER, "content": plain_text(len(body))}]
    plain = json.dumps({**COUNTED, "messages": messages}).encode()
    path = "/v1/messages/count_tokens"
    assert (
        is_harmless(gateway, lambda: gateway.ask(path, body), lambda: gateway.ask(path, plain))
        == ""
    )


@pytest.mark.server
def test_log_probabilities_of_many_prompts_harm_nobody(gateway: Gateway) -> None:
    body = {"prompt": [plain_text(1_400)] * 20, "max_tokens": 1, "prompt_logprobs": 20}
    plain = {**body, "prompt_logprobs": 0}  # with these no prompt comes from the cache

    def greedy() -> None:
        status, answer = gateway.ask("/v1/completions", body)
        assert (status, json.loads(answer)["error"]["param"]) == (400, "prompt_logprobs")

    assert is_harmless(gateway, greedy, lambda: gateway.ask("/v1/completions", plain)) == ""


@pytest.mark.server
def test_unfinished_bodies_are_bounded_together(gateway: Gateway) -> None:
    size = 9 * MIB
    most = MAX_BUFFERED_BYTES // size + 1
    with ExitStack() as peers:

        def greedy() -> None:
            assert peers.enter_context(gateway.unfinished(60, size)) >= 60 - most - 2

        assert gateway.cost(greedy).growth < MAX_BUFFERED_BYTES + MAX_GROWTH
        status, answer = gateway.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert status == 200, answer  # small requests are let in


@pytest.mark.server
def test_cancel_beside_ambiguous_grammars_is_prompt(
    gateway: Gateway, resilient: TritonServer
) -> None:
    body = {**COUNTED, "messages": [USER], "max_tokens": 100, "n": 4, **unfollowable()}
    answers = []

    def flood() -> None:
        answers.append(gateway.ask("/v1/chat/completions", body))

    waiting = longest_wait(resilient.grpc_url, "ensemble", cancel_seconds, flood)
    assert asyncio.run(waiting) < MAX_WAIT_S
    [(status, answer)] = answers
    assert (status, "too ambiguous" in answer.decode()) == (400, True), answer


@pytest.mark.server
def test_more_grammars_than_may_wait_are_refused_and_harm_nobody(gateway: Gateway) -> None:
    slow = {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, 30)]}
    asked = {**COUNTED, "prompt": "a", "max_tokens": 1}

    def ask(**fields: object) -> tuple[int, str]:
        status, answer = gateway.ask("/v1/completions", {**asked, **fields})
        return status, json.loads(answer).get("error", {}).get("message", "")

    with ThreadPoolExecutor(100) as pool:
        first = pool.submit(ask, guided_json=slow)  # until its trial is given up, the others wait
        answers = list(pool.map(lambda number: ask(guided_regex=f"b{number}"), range(80)))
    assert first.result()[0] == 400
    assert Counter(status for status, _ in answers).keys() == {200, 429}
    said = {message for status, message in answers if status == 429}
    assert all("characters of grammars reached (guided_regex: waiting " in each for each in said)
    assert ask(guided_regex="again")[0] == 200
