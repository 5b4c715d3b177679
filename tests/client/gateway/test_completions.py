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


def positions(*texts: str) -> str:
    return json.dumps([{"1": {"logprob": -1.0, "rank": 1, "decoded_token": t}} for t in texts])


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
