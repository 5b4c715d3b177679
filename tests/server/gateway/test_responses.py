"""`/v1/responses` with OpenAI's own clients: every event and response is of their types."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

from client import TridentClient
from engine.launch.server import TritonServer
from tests.server.gateway.checked_responses import FUNCTIONS, GREEDY, checked, create, told, whole
from tests.server.gateway.conftest import MODEL, Blocking, Direct
from tests.server.gateway.tools import CALL, SCHEMAS, TOOLS, USER, written

pytestmark = pytest.mark.server

ARGUMENTS = '{"city": "Zürich", "dry": true}'


def test_a_response_is_the_servers_answer(client: Direct | Blocking, server: TritonServer) -> None:
    asked = {**GREEDY, "input": "One two", "instructions": "Be brief.", "metadata": {"a": "b"}}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One two"}]
    with TridentClient(server.grpc_url) as direct:
        expected = direct.generate(messages=messages, temperature=0, max_tokens=12)
    answer = client.create("responses", **asked)
    found = checked(answer)
    assert answer.output_text == expected.text
    assert (found["status"], found["metadata"]) == ("incomplete", {"a": "b"})
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (found["temperature"], found["top_p"], found["store"]) == (0, 1, False)
    assert found["usage"]["input_tokens"] == expected.num_input_tokens
    assert found["usage"]["output_tokens"] == expected.num_output_tokens
    assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    for options in ({}, {"stream_options": {"include_usage": True}}):
        events = client.create("responses", **asked, stream=True, **options)
        assert told(whole(events)) == told(found)


@pytest.mark.parametrize("top", [None, 2])
def test_logprobs_are_those_of_the_text(tool_openai: OpenAI, saying: Any, top: int | None) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": top, **saying}
    found = checked(create(tool_openai, **asked))
    message = next(item for item in found["output"] if item["type"] == "message")
    positions = message["content"][0]["logprobs"]
    # The tags of calls are not of the text, the end of reasoning is.
    assert "".join(each["token"] for each in positions) == "</think>\n\nLet me see.\n"
    assert all(len(each["top_logprobs"]) >= (top or 0) for each in positions)
    assert told(whole(list(create(tool_openai, stream=True, **asked)))) == told(found)


def test_a_conversation_with_a_tool(tool_openai: OpenAI, saying: Any) -> None:
    answer = create(tool_openai, **saying)
    found = checked(answer)
    thought, message, call = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert (message.type, answer.output_text) == ("message", "Let me see.")
    assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", ARGUMENTS)
    assert {item["status"] for item in found["output"]} == {"completed"}
    assert (found["status"], found["tool_choice"]) == ("completed", "auto")
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert told(whole(list(create(tool_openai, stream=True, **saying)))) == told(found)

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    items = [{"role": "user", "content": USER["content"]}, *answer.output, result]
    second = create(tool_openai, input=items, max_output_tokens=4)
    function = {"name": call.name, "arguments": call.arguments}
    said = {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm"}
    said["tool_calls"] = [{"id": call.call_id, "type": "function", "function": function}]  # type: ignore[assignment]
    messages: Any = [USER, said, {"role": "tool", "tool_call_id": call.call_id, "content": "dry"}]
    chat: Any = tool_openai.chat.completions.create(
        model="ensemble", messages=messages, tools=TOOLS, max_tokens=1
    )
    assert second.usage.input_tokens == chat.usage.prompt_tokens


def test_clients_helpers_read_streams(tool_openai: OpenAI, saying: Any) -> None:
    asked: Any = {"model": "ensemble", "input": "Rain?", "tools": FUNCTIONS, "extra_body": saying}
    with tool_openai.responses.stream(**asked) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == "Let me see."
    assert final.output[2].parsed_arguments is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "get_weather"}], ids=["required", "named"]
)
def test_calls_that_have_to_be_are_enforced(tool_openai: OpenAI, choice: Any, blanks: Any) -> None:
    asked = {"tool_choice": choice, "parallel_tool_calls": False, "logit_bias": blanks}
    answer = create(tool_openai, temperature=0, **asked)
    [call] = answer.output
    assert set(json.loads(call.arguments)) == set(SCHEMAS[call.name]["properties"])  # type: ignore[call-overload]
    assert checked(answer)["tool_choice"] == choice
    events = list(create(tool_openai, temperature=0, stream=True, **asked))
    assert told(whole(events)) == told(checked(answer))


class Rain(BaseModel):
    """What an answer is to be."""

    city: Literal["Rome", "Zürich"]
    dry: bool


def test_clients_parse_what_they_have_asked_for(tool_openai: OpenAI, blanks: Any) -> None:
    answer = tool_openai.responses.parse(
        model="ensemble", input="Rain?", text_format=Rain, extra_body={"logit_bias": blanks}
    )
    assert isinstance(answer.output_parsed, Rain)


def test_a_call_that_was_cut_off_is_incomplete(tool_openai: OpenAI) -> None:
    text = f"<tool_call>\n{CALL}\n</tool_call>"
    answer = create(tool_openai, structured_outputs=written(text), max_output_tokens=56)
    [call] = answer.output
    assert (answer.status, call.status) == ("incomplete", "incomplete")
    assert ARGUMENTS.startswith(call.arguments)


def test_json_is_of_its_schema(tool_openai: OpenAI, blanks: Any) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}}
    answer = create(tool_openai, tools=[], text={"format": form}, logit_bias=blanks)
    assert answer.output_text in ('"yes"', '"no"')
    assert checked(answer)["text"]["format"] == {**form, "description": None, "strict": True}


TEXT = {"type": "input_text", "text": "Hi"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"unheard_of": 1}, "unheard_of", "unknown field"),
    ({"conversation": "conv_1"}, "conversation", "unknown field"),
    ({"messages": []}, "messages", "unknown field"),
    ({"input": []}, "input", "must not be empty"),
    ({"input": 3}, "input", "valid string"),
    ({"input": [{"role": "user", "content": [TEXT, {"type": "input_image"}]}]},
     "input[0].content[1]", "'input_image' is not supported"),
    ({"input": [{"role": "user", "content": [{**TEXT, "x": 1}]}]},
     "input[0].content[0].x", "unknown field"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "there is no item"),
    ({"input": [{"type": "web_search_call"}]}, "input[0]", "'web_search_call' is not"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]},
     "input[0].encrypted_content", "cannot be read"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
     "input[0].call_id", "must be the id of a function call"),
    ({"input": [{"role": "banned", "content": "x"}]}, "input[0].role", "should be 'user'"),
    ({"input": "x" * 3000}, "input", "max_model_len"),
    ({"tools": [{"type": "custom", "name": "c"}]}, "tools[0]", "'custom' is not supported"),
    ({"tools": [*FUNCTIONS, {"type": "web_search"}], "tool_choice": "required"}, "tools[2]",
     "'web_search' is not supported"),
    ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name",
     "is not one of the tools"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search' is not supported"),
    ({"tool_choice": "required"}, "tool_choice", "required needs tools"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort", "only none with"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary", "should be 'auto'"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "only medium"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
     "text.format.schema", "is not enforced"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "required"),
    ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format.name", "unknown field"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "'xml' is not supported"),
    ({"include": ["web_search_call.results"]}, "include[0]", "only message.output_text"),
    ({"top_logprobs": 2}, "top_logprobs", "in include"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"max_output_tokens": -1}, "max_output_tokens", "greater"),
    ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1 (got 0)"),
    ({"input": ["a"]}, "input[0]", "input[0]: must be an object"),
    ({"truncation": "auto"}, "truncation", "nothing is cut"),
    ({"background": True}, "background", "not supported"),
    ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
    ({"n": 2}, "n", "one answer"),
    ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "if stream is true"),
    (
        {"stream": True, "stream_options": {"include_usage": False}},
        *("stream_options.include_usage", "always ends with its usage"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "text"), REFUSED)
def test_what_is_not_offered_is_refused_by_name(
    openai: OpenAI, fields: dict[str, Any], param: str, text: str
) -> None:
    body = {"model": MODEL, "input": "Hi", **fields}
    with pytest.raises(BadRequestError) as caught:
        openai.post("/responses", body=body, cast_to=object)
    assert text in caught.value.message
    assert caught.value.param == param


def test_a_model_that_is_not_there_is_a_404(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError):
        openai.responses.create(model="other", input="Hi")
