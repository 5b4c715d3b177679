"""Conversations of blocks as chats; what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from client.gateway.anthropic.conversation import Conversation
from client.gateway.anthropic.protocol import MessagesRequest
from client.gateway.anthropic.serving import tool_input
from client.gateway.errors import ApiError, fault_of

CACHE = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
CALL = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": [1, None]}}
OTHER = {**CALL, "id": "c2", "caller": {"type": "direct"}, **CACHE}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def result(of: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": of, **more}


def conversation(*messages: tuple[str, Any], **fields: Any) -> Conversation:
    given = [{"role": role, "content": content} for role, content in messages]
    body = MessagesRequest.model_validate(
        {"model": "m", "max_tokens": 1, "messages": given, **fields}
    )
    return Conversation.of(body.system or (), body.messages, kept_thinking=body.kept_thinking)


@pytest.mark.timeout(10)  # it took 20 s when each turn copied those before it
def test_very_many_turns_of_one_role_are_one_soon() -> None:
    [turn] = MessagesRequest.model_validate(
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    ).messages
    [message] = Conversation.of((), [turn] * 100_000).messages
    assert message == {"role": "user", "content": [text("a")] * 100_000}


def test_texts_are_the_same_as_strings_and_as_blocks() -> None:
    expected = [
        {"role": "system", "content": [text("s")]},
        {"role": "user", "content": [text("a"), text("b")]},
    ]
    assert conversation(("user", [text("a"), text("b", **CACHE)]), system="s").messages == expected
    system = [text("x-anthropic-billing-header: cc_version=2.1.2f;"), text("s", **CACHE)]
    # Two turns of one role are one.
    assert conversation(("user", "a"), ("user", "b"), system=system).messages == expected


def test_calls_and_their_results() -> None:
    thinking = [
        {"type": "thinking", "thinking": "h", "signature": "x"},
        {"type": "redacted_thinking", "data": "?"},
        {"type": "thinking", "thinking": "m"},
    ]
    made = conversation(
        ("user", "a"),
        ("assistant", [*thinking, text("b"), CALL, OTHER]),
        ("user", [result("c1", content="r"), result("c2", content=[text("x")], is_error=True)]),
        ("user", [result("c3"), text("and?")]),
        ("system", "s"),
    )
    functions = [
        {"id": id_, "type": "function", "function": {"name": "f", "arguments": {"a": [1, None]}}}
        for id_ in ("c1", "c2")
    ]
    assert made.messages == [
        {"role": "user", "content": [text("a")]},
        {
            "role": "assistant",
            "content": [text("b")],
            "reasoning_content": "hm",
            "tool_calls": functions,
        },
        {"role": "tool", "tool_call_id": "c1", "content": [text("r")]},
        {"role": "tool", "tool_call_id": "c2", "content": [text("Error:"), text("x")]},
        {"role": "tool", "tool_call_id": "c3", "content": []},
        {"role": "user", "content": [text("and?")]},
        {"role": "system", "content": [text("s")]},
    ]
    assert not made.is_continued
    where = "messages[4].x and messages[3].content; messages[9]"
    assert made.placed(where) == "messages[3].x and messages[2].content; messages[9]"


@given(arguments=st.text())
@example('{"a": "x\ny"}')
def test_input_that_is_no_json_goes_back_as_it_was_written(arguments: str) -> None:
    answered = json.loads(bytes(tool_input(arguments)))
    for given_back in (answered, arguments):
        call = {**CALL, "input": given_back}
        made = conversation(("assistant", [call]), ("user", [result("c1")]))
        [function] = [each["function"] for each in made.messages[0]["tool_calls"]]
        if given_back is arguments or "INVALID_JSON" in answered:
            assert function["arguments"] == arguments
        else:  # what is read of one that was cut off
            assert function["arguments"] == answered


def test_a_template_without_a_place_for_late_instructions() -> None:
    body = MessagesRequest.model_validate(
        {
            "model": "m",
            "max_tokens": 1,
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "system", "content": "late"},
            ],
        }
    )
    made = Conversation.of((), body.messages, takes_late_system=False)
    marked = [text(each) for each in ("a", "<system>", "late", "</system>")]
    assert made.messages == [
        {"role": "system", "content": [text("s")]},
        {"role": "user", "content": marked},
    ]


def test_the_models_own_words_are_continued() -> None:
    assert conversation(("user", "a"), ("assistant", "The")).is_continued
    for content in ([], [CALL], [text("a"), {"type": "thinking", "thinking": ""}]):
        with pytest.raises(ApiError, match=r"messages\[1\].content: must end with a text"):
            conversation(("user", "a"), ("assistant", content))


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({"keep": "all"}, ["h1", "h2", "h3"]),
        ({"keep": {"type": "all"}}, ["h1", "h2", "h3"]),
        ({"keep": {"type": "thinking_turns", "value": 9}}, ["h1", "h2", "h3"]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, ["h1", "h2", "h3"]),
        ({"keep": {"type": "thinking_turns", "value": 1}}, ["h2", "h3"]),
        ({}, ["h2", "h3"]),
    ],
)
def test_thinking_of_older_turns_is_left_out(keep: dict[str, Any], kept: list[str]) -> None:
    def thinking(content: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": content}

    made = conversation(
        ("user", "a"),
        ("assistant", [thinking("h1"), text("b")]),
        ("user", "c"),
        # Calls of tools and their results are one turn.
        ("assistant", [thinking("h2"), CALL]),
        ("user", [result("c1"), text("Hurry.")]),
        ("assistant", [thinking("h3"), text("d")]),
        ("user", "e"),
        ("assistant", "f"),  # one without thinking does not count
        ("user", "g"),
        context_management={"edits": [{"type": "clear_thinking_20251015", **keep}]},
        diagnostics={"previous_message_id": "msg_1"},
    )
    found = [message.get("reasoning_content") for message in made.messages]
    assert [each for each in found if each] == kept
    assert [message["content"] for message in made.messages][1] == [text("b")]


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": ["a"]}, "messages[0]: must be an object"),
    ({"messages": [{"role": "tool"}]}, "messages[0]: role 'tool' is not supported, only user, "),
    ({"messages": [{"role": "user"}]}, "messages[0].content: Field required"),
    ({"content": 3}, "messages[0].content: must be a string or a list of blocks"),
    ({"content": ["a"]}, "messages[0].content[0]: must be an object"),
    (
        {"content": [text("a"), IMAGE]},
        "messages[0].content[1]: type 'image' is not supp",
    ),
    (
        {"content": [{"type": "document"}]},
        "messages[0].content[0]: type 'document' is not",
    ),
    ({"content": [CALL]}, "messages[0].content[0]: type 'tool_use' is not supported, only text, "),
    ({"content": [text("a", x=1)]}, "messages[0].content[0].x: unknown field"),
    ({"content": [text("a", citations=[1])]}, "messages[0].content[0].citations: "),
    (
        {"content": [text("a", cache_control={"type": "ephemeral", "ttl": "2h"})]},
        "messages[0].content[0].cache_control.ttl: Input should be '5m' or '1h'",
    ),
    (
        {"content": [result("c", content=[IMAGE])]},
        "messages[0].content[0].content[0]: ",
    ),
    ({"system": [IMAGE]}, "system[0]: type 'image' is not supported, only text"),
    ({"tools": [{"type": "web_search_20260318", "name": "w"}]}, "tools[0].type: only custom tools"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: Field required"),
    ({"tools": [{"name": "f", "input_schema": {}, "input_examples": []}]}, "tools[0].input_exam"),
    ({"tool_choice": {"type": "function"}}, "tool_choice: type 'function' is not supported, only"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name: Field required"),
    ({"thinking": {"type": "between_tools"}}, "thinking: type 'between_tools' is not supported"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: Field required"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1023}},
        "thinking.budget_tokens: Input should be greater than or equal to 1024",
    ),
    (
        {"thinking": {"type": "adaptive", "display": "shown"}},
        "thinking.display: Input should be 's",
    ),
    ({"output_config": {"effort": "some"}}, "output_config.effort: Input should be 'low', "),
    ({"output_config": {"format": {"type": "x"}}}, "output_config.format.type: Input should be"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: Field"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0].type: is not offered",
    ),
    (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "x"}]}},
        "context_management.edits[0].keep: must be all or ",
    ),
    (
        {
            "context_management": {
                "edits": [
                    {
                        "type": "clear_thinking_20251015",
                        "keep": {"type": "thinking_turns", "value": 0},
                    }
                ]
            }
        },
        "context_management.edits[0].keep: must be all or ",
    ),
    ({"diagnostics": {"x": 1}}, "diagnostics.x: unknown field"),
    ({"metadata": {"user": "x"}}, "metadata.user: unknown field"),
    ({"mcp_servers": [{}]}, "mcp_servers: "),
    ({"container": "c"}, "container: is not offered"),
    ({"speed": "fast"}, "speed: only standard"),
    ({"service_tier": "priority"}, "service_tier: Input should be 'auto' or 'standard_only'"),
    ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
    ({"n": 2}, "n: unknown field"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_is_not_offered_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    asked = dict(fields)
    content = asked.pop("content", "a")
    whole = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    with pytest.raises(ValidationError) as caught:
        MessagesRequest.model_validate({**whole, **asked})
    error = fault_of(caught.value.errors())
    assert str(error).startswith(message)
