"""Anthropic's tool runner and its parser of answers, before a scripted server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic, beta_tool
from anthropic.types import ModelInfo
from pydantic import BaseModel

from client.gateway.settings import GatewaySettings
from tests.client.fake_triton import Answer, FakeTriton, Piece
from tests.server.gateway.running import running

CALL = '\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
ASKED: Any = {
    "model": "ensemble",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "1 + 2?"}],
}


@beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Number(BaseModel):
    x: int


@pytest.fixture
def client(triton: FakeTriton) -> Iterator[Anthropic]:
    triton.health = '{"state": "ready", "tool_call_parser": "hermes"}'
    with (
        running(GatewaySettings((triton.url,))) as address,
        Anthropic(base_url=f"http://{address}", api_key="none", max_retries=0) as made,
    ):
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_run_until_the_answer_is_there(
    client: Anthropic, triton: FakeTriton, stream: bool
) -> None:
    called = [Piece({0: CALL[i : i + 7]}, section=(1, "tool_call")) for i in range(0, 49, 7)]
    triton.first = [
        Answer(
            [
                Piece({0: "hm"}, section=(0, "reasoning")),
                *called,
                Piece({0: ""}, (0,), final=True, section=(2, "content")),
            ]
        ),
        Answer([Piece({0: "It is 3."}, (0,), final=True)]),
    ]
    runner: Any = client.beta.messages.tool_runner(**ASKED, tools=[add], stream=stream)
    first, last = (turn.get_final_message() if stream else turn for turn in runner)
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    assert (first.content[1].input, first.stop_reason) == ({"a": 1, "b": 2}, "tool_use")
    assert ([block.text for block in last.content], last.stop_reason) == (["It is 3."], "end_turn")
    user, said, result = json.loads(triton.requests[-1]["messages"])
    assert (user["role"], result["role"]) == ("user", "tool")
    assert said["reasoning_content"] == "hm"
    assert said["tool_calls"][0]["id"] == result["tool_call_id"] == first.content[1].id
    assert result["content"] == [{"type": "text", "text": "3"}]


def test_models_are_listed(client: Anthropic) -> None:
    [model] = client.models.list()
    ModelInfo.model_validate(model.to_dict(), strict=True)
    assert (model.id, model.display_name, model.type) == ("ensemble", "ensemble", "model")
    assert model.created_at.tzinfo is not None
    assert client.models.retrieve("ensemble").id == "ensemble"


def test_answers_are_parsed(client: Anthropic, triton: FakeTriton) -> None:
    triton.first = [Answer([Piece({0: '{"x": 4}'}, (0,), final=True)])]
    answer = client.messages.parse(**ASKED, output_format=Number)
    assert answer.parsed_output == Number(x=4)
    asked = triton.requests[-1]["sampling_parameters"]["response_format"]["json_schema"]
    assert (asked["strict"], asked["schema"]["required"]) == (True, ["x"])
