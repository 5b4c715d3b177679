"""Log-probabilities of an answer are bounded over all of its prompts and sequences."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from msgspec import Raw

from client.gateway.generation import AT_ONCE, Generation, merged
from client.gateway.openai import logprobs
from client.protocol import Chunk, TokenLogprobs
from tests.client.fake_triton import Piece
from tests.client.gateway.in_process import InProcess

TOKENS = 10
LIMIT = 2000  # in place of the real one
TOP = {
    str(token): {"logprob": -token, "rank": token + 1, "decoded_token": "a"} for token in range(21)
}
POSITIONS = json.dumps([TOP] * TOKENS)
OF_PROMPT = json.dumps([None, *[TOP] * TOKENS])
FITTING = LIMIT // (TOKENS * len(TOP))
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def gateway() -> Iterator[InProcess]:
    with InProcess() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "MAX_LOGPROBS_AT_ONCE", LIMIT)
        yield made


def ask(gateway: InProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer, or the error with the status `refused`."""
    status, answer = gateway.ask(path, body)
    found: dict[str, Any] = json.loads(answer)
    return found if status == 200 else {"refused": status, **found["error"]}


def is_refused(answer: dict[str, Any], field: str) -> bool:
    told = f"{field}: the answer has more than {LIMIT} log-probabilities "
    return (
        answer.get("refused") == 400
        and answer["param"] == field
        and answer["message"].startswith(told)
    )


@pytest.mark.parametrize("n", [1, 2])
def test_those_of_prompts_count_together_and_for_each_choice(gateway: InProcess, n: int) -> None:
    texts = dict.fromkeys(range(n), "x")
    ended = tuple(texts)
    gateway.pieces = [Piece(texts, ended, True, prompt_logprobs=OF_PROMPT)]
    body = {"n": n, "prompt_logprobs": 20}
    fitting = ["a"] * (FITTING // n)
    answer = ask(gateway, "/v1/completions", {**body, "prompt": fitting})
    assert len(answer["choices"]) == len(fitting) * n
    assert all(len(each["prompt_logprobs"]) == TOKENS + 1 for each in answer["choices"])
    answer = ask(gateway, "/v1/completions", {**body, "prompt": [*fitting, "a", "a"]})
    assert is_refused(answer, "prompt_logprobs")


def test_those_of_echoed_prompts_count(gateway: InProcess) -> None:
    gateway.pieces = [
        Piece({0: "a"}, (0,), True, logprobs=("[]",), prompt_logprobs=OF_PROMPT),
    ]
    body = {"echo": True, "logprobs": 5, "max_tokens": 1}
    prompts = ["a"] * (FITTING + 1)
    assert "choices" in ask(gateway, "/v1/completions", {**body, "prompt": prompts[1:]})
    assert is_refused(ask(gateway, "/v1/completions", {**body, "prompt": prompts}), "logprobs")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 5}, "logprobs"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "logprobs": True, "top_logprobs": 20},
            "top_logprobs",
        ),
        (
            "/v1/responses",
            {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 20},
            "top_logprobs",
        ),
    ],
)
def test_those_of_an_answer_count(
    gateway: InProcess, path: str, body: dict[str, Any], field: str
) -> None:
    last = Piece({0: ""}, (0,), True, logprobs=("[]",))
    gateway.pieces = [*[Piece({0: "a"}, logprobs=(POSITIONS,))] * FITTING, last]
    assert "refused" not in ask(gateway, path, body)
    gateway.pieces = [*[Piece({0: "a"}, logprobs=(POSITIONS,))] * (FITTING + 1), last]
    assert is_refused(ask(gateway, path, body), field)
    if path != "/v1/responses":  # whose last events have all of them
        status, answer = gateway.ask(path, {**body, "stream": True})
        assert status == 200
        assert answer.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in answer


@pytest.mark.parametrize(
    ("path", "body", "builder"),
    [
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 20}, "serving_completions"),
        ("/v1/chat/completions", {"messages": [USER], "prompt_logprobs": 20}, "serving_chat"),
    ],
)
def test_prompt_logprobs_are_encoded_off_the_event_loop(
    gateway: InProcess,
    path: str,
    body: dict[str, Any],
    builder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a long prompt take a tenth of a second and more, in which others are served."""
    threads = []

    def noted(positions: Sequence[TokenLogprobs]) -> Raw:
        threads.append(threading.get_ident())
        return logprobs.prompt_logprobs(positions)

    monkeypatch.setattr(f"client.gateway.openai.{builder}.prompt_logprobs", noted)
    gateway.pieces = [Piece({0: "x"}, (0,), True, prompt_logprobs=OF_PROMPT)]
    assert "choices" in ask(gateway, path, body)
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()  # the loop is this thread's


class Endless:
    """A client whose answers do not end."""

    def __init__(self) -> None:
        self.num_sent = 0

    async def stream(self, *_: object, **__: object) -> AsyncGenerator[Chunk, None]:
        while True:
            self.num_sent += 1
            yield Chunk("a")


def test_answers_wait_for_who_reads_slowly() -> None:
    async def episode() -> None:
        client: Any = Endless()
        generations = [Generation(str(i), {}, prompt="a") for i in range(2 * AT_ONCE)]
        async with aclosing(merged(client, generations)) as pieces:
            for num_read in range(1, 100):
                await anext(pieces)
                for _ in range(10):
                    await asyncio.sleep(0)
                assert client.num_sent <= num_read + 2 * AT_ONCE

    asyncio.run(episode())
