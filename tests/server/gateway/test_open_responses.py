"""The cases of Open Responses' compliance suite (openresponses.org, specification 2026-04-24).

A grammar lets the random model write what a model would. Events of reasoning are OpenAI's
(`response.reasoning_text`): the specification has another name for them, which no client knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.client.gateway.asking import Reply, ask
from tests.server.gateway.tools import written

pytestmark = pytest.mark.server

Post = Callable[..., Reply]


def each_of(**fields: Any) -> dict[str, Any]:
    """Return the schema of an object that has all of these fields."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def maybe(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def typed(kind: str, **fields: Any) -> dict[str, Any]:
    return each_of(type={"const": kind}, **fields)


TEXT, NUMBER, WHOLE, FLAG = ({"type": t} for t in ("string", "number", "integer", "boolean"))
LIST = {"type": "array"}
STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
PART = {
    "anyOf": [
        typed("output_text", text=TEXT, annotations=LIST, logprobs=LIST),
        typed("reasoning_text", text=TEXT),
    ]
}
PARTS = {"type": "array", "items": PART}
CALL = {"id": TEXT, "call_id": TEXT, "name": TEXT, "arguments": TEXT, "status": STATUS}
ITEM = {
    "anyOf": [
        typed("message", id=TEXT, status=STATUS, role={"const": "assistant"}, content=PARTS),
        typed("function_call", **CALL),
        typed("reasoning", id=TEXT, content=PARTS, summary=LIST),
    ]
}
TOOL = typed(
    "function",
    name=TEXT,
    description=maybe(TEXT),
    parameters=maybe({"type": "object"}),
    strict=maybe(FLAG),
)
USAGE = each_of(
    input_tokens=WHOLE,
    output_tokens=WHOLE,
    total_tokens=WHOLE,
    input_tokens_details=each_of(cached_tokens=WHOLE),
    output_tokens_details=each_of(reasoning_tokens=WHOLE),
)
RESPONSE = each_of(
    id=TEXT,
    object={"const": "response"},
    created_at=WHOLE,
    completed_at=maybe(WHOLE),
    status=TEXT,
    incomplete_details=maybe(each_of(reason=TEXT)),
    model=TEXT,
    previous_response_id=maybe(TEXT),
    instructions=maybe(TEXT),
    output={"type": "array", "items": ITEM},
    error=maybe(each_of(code=TEXT, message=TEXT)),
    tools={"type": "array", "items": TOOL},
    tool_choice={"enum": ["none", "auto", "required"]},
    truncation={"enum": ["auto", "disabled"]},
    parallel_tool_calls=FLAG,
    text=each_of(format=each_of(type=TEXT)),
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=WHOLE,
    temperature=NUMBER,
    reasoning=maybe(each_of(effort=maybe(TEXT), summary=maybe(TEXT))),
    usage=maybe(USAGE),
    max_output_tokens=maybe(WHOLE),
    max_tool_calls=maybe(WHOLE),
    store=FLAG,
    background=FLAG,
    service_tier=TEXT,
    metadata={},
    safety_identifier=maybe(TEXT),
    prompt_cache_key=maybe(TEXT),
)
AT = {"item_id": TEXT, "output_index": WHOLE}
IN = {**AT, "content_index": WHOLE}
EVENTS = {
    "created": {"response": RESPONSE},
    "in_progress": {"response": RESPONSE},
    "completed": {"response": RESPONSE},
    "output_item.added": {"output_index": WHOLE, "item": ITEM},
    "output_item.done": {"output_index": WHOLE, "item": ITEM},
    "content_part.added": {**IN, "part": PART},
    "content_part.done": {**IN, "part": PART},
    "output_text.delta": {**IN, "delta": TEXT, "logprobs": LIST},
    "output_text.done": {**IN, "text": TEXT, "logprobs": LIST},
    "reasoning_text.delta": {**IN, "delta": TEXT},
    "reasoning_text.done": {**IN, "text": TEXT},
    "function_call_arguments.delta": {**AT, "delta": TEXT},
    "function_call_arguments.done": {**AT, "arguments": TEXT},
}

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city and state"}},
        "required": ["location"],
    },
}
SAID = "Ahoy!"
CALLED = '<tool_call>{"name": "get_weather", "arguments": {"location": "Oslo"}}</tool_call>'


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


@pytest.fixture(scope="module")
def post(tool_gateway: str, tool_tokenizer: Any) -> Post:
    """Asks a model that writes a text of ours, and does not think before."""
    bias = {str(tool_tokenizer.convert_tokens_to_ids("<think>")): -100}

    def ask_for(text: str, *messages: dict[str, Any], **fields: Any) -> Reply:
        own = {"structured_outputs": written(text), "logit_bias": bias}
        body = {"model": "ensemble", "input": messages, **own, **fields}
        return ask(tool_gateway, "POST", "/v1/responses", body, authorization="Bearer x")

    return ask_for


def valid(response: Any) -> Any:
    Draft202012Validator(RESPONSE).validate(response)
    assert response["output"]
    assert response["status"] == "completed"
    return response


def events_of(reply: Reply) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which has its name twice."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    *blocks, done, rest = reply.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        fields = EVENTS[event["type"].removeprefix("response.")]
        schema = typed(event["type"], sequence_number=WHOLE, **fields)
        Draft202012Validator(schema).validate(event)
        events.append(event)
    valid(events[-1]["response"])
    return events


@pytest.mark.parametrize(
    "messages",
    [
        [message("user", "Say hello in exactly 3 words.")],
        [
            message("system", "You are a pirate. Always respond in pirate speak."),
            message("user", "Say hello."),
        ],
        [
            message("user", "My name is Alice."),
            message("assistant", "Hello Alice! Nice to meet you. How can I help you today?"),
            message("user", "What is my name?"),
        ],
    ],
    ids=["basic-response", "system-prompt", "multi-turn"],
)
def test_an_answer(post: Post, messages: list[dict[str, Any]]) -> None:
    [item] = valid(json.loads(post(SAID, *messages).body))["output"]
    assert item["content"][0]["text"] == SAID


def test_a_streamed_answer(post: Post) -> None:
    events = events_of(post(SAID, message("user", "Count to 5."), stream=True))
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == SAID


def test_a_tool_is_called(post: Post) -> None:
    asked = message("user", "What's the weather like in San Francisco?")
    [item] = valid(json.loads(post(CALLED, asked, tools=[WEATHER]).body))["output"]
    assert (item["type"], item["name"]) == ("function_call", "get_weather")
    events = events_of(post(CALLED, asked, tools=[WEATHER], stream=True))
    kinds = {event["type"].removeprefix("response.") for event in events}
    assert kinds >= {"function_call_arguments.delta", "function_call_arguments.done"}
    items = [event["item"]["type"] for event in events if "item" in event]
    assert items == ["function_call", "function_call"]


def test_images_are_refused_by_name(post: Post) -> None:
    parts = [
        {"type": "input_text", "text": "What do you see?"},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
    ]
    reply = post(SAID, message("user", parts))
    assert (reply.status, reply.error["code"]) == (400, "unsupported")
    assert reply.error["param"] == "input[0].content[1]"
    assert "'input_image' is not supported" in reply.error["message"]
