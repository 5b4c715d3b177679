"""Items as the messages of a chat."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from client.gateway.errors import ApiError
from client.gateway.responses.conversation import Conversation
from client.gateway.responses.protocol import InputItem

ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "x"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def conversation(*items: dict[str, Any], **options: Any) -> Conversation:
    made = Conversation(**options)
    made.add(ITEMS.validate_python(list(items)), "input[{}]")
    return made


def test_what_belongs_to_one_turn_is_one_message() -> None:
    made = conversation(said("user", "a"), THOUGHT, said("assistant", "b"), CALL, RESULT, THOUGHT)
    assert made.messages == [
        {"role": "user", "content": parts("a")},
        {
            "role": "assistant",
            "reasoning_content": "h",
            "content": parts("b"),
            "tool_calls": [CALLED],
        },
        {"role": "tool", "content": parts("x"), "tool_call_id": "c1"},
        {"role": "assistant", "reasoning_content": "h", "content": ""},
    ]


def test_what_follows_a_call_is_another_turn() -> None:
    made = conversation(CALL, {**CALL, "call_id": "c2"}, said("assistant", "b"), THOUGHT)
    assert [sorted(message.keys() - {"role"}) for message in made.messages] == [
        ["tool_calls"],
        ["content"],
        ["content", "reasoning_content"],
    ]
    assert len(made.messages[0]["tool_calls"]) == 2


@pytest.mark.parametrize("takes_late_system", [True, False])
def test_instructions_begin_and_late_ones_have_a_place(takes_late_system: bool) -> None:
    made = Conversation(takes_late_system=takes_late_system)
    made.add_system("one", "instructions")
    items = [said("developer", "two"), said("user", "a"), said("system", "three")]
    made.add(ITEMS.validate_python(items), "input[{}]")
    first, user, late = made.messages
    assert first == {"role": "system", "content": parts("one", "two")}
    assert user["role"] == "user"
    marked = {"role": "user", "content": parts("<system>", "three", "</system>")}
    assert late == ({"role": "system", "content": parts("three")} if takes_late_system else marked)


def test_errors_name_the_items() -> None:
    made = conversation(said("user", "a"), said("assistant", "b"), CALL, {**CALL, "call_id": "c2"})
    param = "messages[1].tool_calls[1].function.arguments"
    told = made.told(ApiError("is not valid JSON", param=param))
    assert str(told) == "input[3].arguments: is not valid JSON"
    assert told.param == "input[3].arguments"
    assert made.told(ApiError("messages[1]: x; messages[0]: y")).message == (
        "input[1]: x; input[0]: y"
    )
    with pytest.raises(ApiError, match=r"input\[0\].call_id: must be the id of a function call"):
        conversation(RESULT)
