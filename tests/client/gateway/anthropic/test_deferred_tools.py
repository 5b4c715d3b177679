"""Tools with `defer_loading`: the model is told of them where a result refers to them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from client.gateway.anthropic.protocol import MessagesRequest
from client.gateway.anthropic.serving import MessagesChat
from client.gateway.errors import ApiError
from client.protocol import Health


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "description": "é", "input_schema": {"type": "object"}, **more}


def deferred(name: str, **more: Any) -> dict[str, Any]:
    return tool(name, defer_loading=True, **more)


def reference(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "tool_name": name, "cache_control": {"type": "ephemeral"}}


def chat(*tools: dict[str, Any], found: Any = "nothing", **fields: Any) -> MessagesChat:
    call = {"type": "tool_use", "id": "c", "name": "search", "input": {}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [call]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "b"},
                {"type": "tool_result", "tool_use_id": "c", "content": found},
            ],
        },
    ]
    body = {"model": "m", "max_tokens": 5, "messages": messages, "tools": [*tools], **fields}
    return MessagesChat(MessagesRequest.model_validate(body), Health("ready"))


def names(made: MessagesChat) -> list[str]:
    return [each["function"]["name"] for each in made.parameters.get("tools", [])]


def test_what_nothing_refers_to_is_left_out() -> None:
    made = chat(deferred("w"), tool("search"), tool("x", defer_loading=False))
    assert names(made) == list(made.tool_choice.functions) == ["search", "x"]


def test_what_was_found_is_told_in_its_place_and_can_be_called() -> None:
    found = [reference("w"), {"type": "text", "text": "and"}, reference("search"), reference("w")]
    made = chat(deferred("v"), deferred("w"), tool("search"), found=found)
    # So the prompt before the result stays as it was.
    assert names(made) == names(chat(deferred("v"), deferred("w"), tool("search"))) == ["search"]
    assert list(made.tool_choice.functions) == ["search", "w"]
    told, text, other, again = (part["text"] for part in made.conversation.messages[-1]["content"])
    assert text == "and"
    assert json.loads(told)["function"] == {
        "name": "w",
        "description": "é",
        "parameters": {"type": "object"},
    }
    assert "é" in told
    assert json.loads(other)["function"]["name"] == "search"
    assert again == "w"  # a prompt has each definition once


def test_without_others_they_are_told_as_usual() -> None:
    """A chat template says how tools are called when it gets some."""
    made = chat(deferred("v"), deferred("w"), found=[reference("w")])
    assert names(made) == list(made.tool_choice.functions) == ["w"]
    assert not chat(deferred("v")).tool_choice.functions


def test_a_reference_to_no_tool_is_refused_by_its_place() -> None:
    with pytest.raises(ApiError) as caught:
        chat(tool("search"), found=[{"type": "text", "text": "a"}, reference("x" * 1000)])
    param = "messages[2].content[1].content[1].tool_name"
    assert (str(caught.value), caught.value.param) == (
        f"{param}: must be the name of a tool in tools",
        param,
    )


def test_errors_name_tools_as_the_client_does() -> None:
    made = chat(deferred("v"), deferred("w"), tool("search"), found=[reference("w")])
    wrong = ApiError("is wrong", param="tools[1].function.parameters")
    assert str(made.renamed(wrong)) == "tools[1].input_schema: is wrong"
    assert made.renamed(ApiError("tools[0]: x and tools[7]")).message == "tools[2]: x and tools[7]"
