"""Completions of a scripted server: what belongs to the prompt is in each of its choices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from client.gateway.settings import GatewaySettings
from tests.client.fake_triton import FakeTriton, Piece
from tests.client.gateway.asking import ask
from tests.server.gateway.running import running


def positions(*texts: str | bytes) -> str:
    """Return positions of these tokens; bytes are a part of a character."""
    told: list[dict[str, Any]] = [
        {"decoded_token": t}
        if isinstance(t, str)
        else {"decoded_token": t.decode("utf-8", "replace"), "bytes": list(t)}
        for t in texts
    ]
    return json.dumps([{"1": {"logprob": -1.0, "rank": 1, **each}} for each in told])


OF_PROMPT = json.dumps([None, *json.loads(positions("b"))])


@pytest.fixture(scope="module")
def gateway(triton: FakeTriton) -> Iterator[str]:
    with running(GatewaySettings((triton.url,))) as address:
        yield address


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_choice_has_the_logprobs_of_its_prompt(
    gateway: str, triton: FakeTriton, order: tuple[int, int]
) -> None:
    first, second = order
    triton.pieces = [
        Piece({first: "abx"}, logprobs=(positions("x"),), prompt_logprobs=OF_PROMPT),
        Piece({second: "aby"}, logprobs=(positions("y"),)),
        Piece({first: "", second: "z"}, (0, 1), True, logprobs=("[]", positions("z"))),
    ]
    body: dict[str, Any] = {"prompt": "ab", "echo": True, "logprobs": 0, "n": 2}
    reply = ask(gateway, "POST", "/v1/completions", {**body, "prompt_logprobs": 0})
    found = {choice["index"]: choice for choice in json.loads(reply.body)["choices"]}
    assert [found[index]["logprobs"]["tokens"] for index in order] == [
        ["a", "b", "x"],
        ["a", "b", "y", "z"],
    ]
    assert found[second]["logprobs"]["token_logprobs"] == [None, -1, -1, -1]
    assert found[second]["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert found[first]["prompt_logprobs"] == found[second]["prompt_logprobs"] is not None


@pytest.mark.parametrize(
    ("text", "of_prompt", "of_answer", "expected"),
    [
        ("abc", ["b"], ["c", "<eos>"], ["a", "b", "c", "<eos>"]),
        ("a", [], ["<eos>"], ["a", "<eos>"]),
        ("aaaa", ["a"], ["a", "a", "<eos>"], ["a", "a", "a", "a", "<eos>"]),
        ("The sea", [" sea"], [" st", "op"], ["The", " sea", " st", "op"]),  # a stop string
        ("The s \ufffd", [" s"], [b" \xf0"], ["The", " s", " \ufffd"]),
        ("hi \ufffd\na", [b" \xf0\x9f"], ["\na"], ["hi", " \ufffd", "\na"]),
        (
            "hi 😊",
            [b" \xf0\x9f"],
            [b"\x98\x8a", "<eos>"],
            ["hi", " \ufffd", "\ufffd\ufffd", "<eos>"],
        ),
    ],
)
def test_the_first_token_is_found_whatever_ends_the_answer(
    gateway: str,
    triton: FakeTriton,
    text: str,
    of_prompt: list[str | bytes],
    of_answer: list[str | bytes],
    expected: list[str],
) -> None:
    prompt_logprobs = json.dumps([None, *json.loads(positions(*of_prompt))])
    logprobs = (positions(*of_answer),)
    triton.pieces = [
        Piece({0: text}, (0,), True, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    ]
    body = {"prompt": [1], "echo": True, "logprobs": 0}
    reply = ask(gateway, "POST", "/v1/completions", body)
    assert json.loads(reply.body)["choices"][0]["logprobs"]["tokens"] == expected


@pytest.mark.parametrize("prompt", ["hi 😊 you", [1]])
def test_offsets_are_those_of_characters(gateway: str, triton: FakeTriton, prompt: Any) -> None:
    face = "😊".encode()
    of_prompt = positions(b" " + face[:2], face[2:3], face[3:], " you")
    of_answer = positions(face[:2], face[2:], "!", "<eos>")
    triton.pieces = [
        Piece(
            {0: "hi 😊 you😊!"},
            (0,),
            True,
            logprobs=(of_answer,),
            prompt_logprobs=json.dumps([None, *json.loads(of_prompt)]),
        )
    ]
    body = {"prompt": prompt, "echo": True, "logprobs": 0}
    reply = ask(gateway, "POST", "/v1/completions", body)
    found = json.loads(reply.body)["choices"][0]["logprobs"]
    assert found["tokens"][0] == "hi"
    assert found["text_offset"] == [0, 2, 3, 3, 4, 8, 8, 9, 10]
