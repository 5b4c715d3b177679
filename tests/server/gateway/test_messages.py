"""`/v1/messages` with Anthropic's own clients; every event has the type that they declare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic, BadRequestError
from anthropic.types import Message
from jsonschema import Draft202012Validator

from client import TridentClient
from engine.launch.server import TritonServer
from tests.client.gateway.asking import ask as post
from tests.server.conftest import MAX_MODEL_LEN
from tests.server.gateway.anthropic_caller import Caller
from tests.server.gateway.conftest import MODEL
from tests.server.gateway.tools import SCHEMAS

pytestmark = pytest.mark.server

USER = {"role": "user", "content": "One two"}
RAIN = {"role": "user", "content": "Rain in Rome?"}
GREEDY: dict[str, Any] = {"temperature": 0}
CACHE = {"type": "ephemeral"}
TOOLS: Any = [
    {
        "name": name,
        "description": "d",
        "input_schema": schema,
        "cache_control": CACHE,
    }
    for name, schema in SCHEMAS.items()
]


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def client(request: pytest.FixtureRequest, gateway: str) -> Iterator[Caller]:
    """Of a model that neither thinks nor calls tools."""
    made = Caller(gateway, request.param)
    yield made
    made.close()


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def caller(request: pytest.FixtureRequest, tool_gateway: str) -> Iterator[Caller]:
    """Of one that does both, as far as it is made to."""
    made = Caller(tool_gateway, request.param)
    yield made
    made.close()


def ask(call: Any, **fields: Any) -> Any:
    """Call with greedy decoding, which newer packages of Anthropic have no argument for."""
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "messages": [USER], **fields}
    return call(**asked, extra_body={**GREEDY, **asked.pop("extra_body", {})})


def comparable(message: Message) -> dict[str, Any]:
    made = message.to_dict(exclude_none=True)
    usage: Any = made.pop("usage")
    made.pop("id")
    for block in made["content"]:  # type: ignore[attr-defined]
        block.pop("id", None)
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return {**made, "prompt": prompt, "output": usage["output_tokens"]}


@pytest.fixture(scope="module")
def direct(server: TritonServer) -> Iterator[TridentClient]:
    with TridentClient(server.grpc_url) as client:
        yield client


def test_an_answer_is_the_servers(client: Caller, direct: TridentClient) -> None:
    expected = direct.generate(messages=[USER], max_tokens=12, temperature=0)
    answer = ask(client, metadata={"user_id": "me"}, service_tier="auto")
    Message.model_validate(answer.to_dict(), strict=True)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert answer.id.startswith("msg_")
    assert [block.text for block in answer.content] == [expected.text]
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.output_tokens == expected.num_output_tokens
    assert comparable(ask(client.streamed)) == comparable(answer)


def test_the_events_of_a_stream(client: Caller) -> None:
    start, *events, delta, stop = ask(client, stream=True)
    kinds = [event.type for event in events]
    inner = len(kinds) - 2
    assert kinds == ["content_block_start", *["content_block_delta"] * inner, "content_block_stop"]
    assert (start.type, start.message.content, start.message.stop_reason) == (
        "message_start",
        [],
        None,
    )
    assert (delta.type, delta.delta.stop_reason, stop.type) == (
        "message_delta",
        "max_tokens",
        "message_stop",
    )
    text = "".join(event.delta.text for event in events[1:-1])
    assert [block.text for block in ask(client).content] == [text]


def test_tokens_are_counted_as_they_are_used(caller: Caller) -> None:
    asked: dict[str, Any] = {
        "system": [{"type": "text", "text": "Be brief. " * 9}],
        "messages": [RAIN, {"role": "assistant", "content": "It"}],
    }
    for fields in (asked, {**asked, "tools": TOOLS}, {**asked, "thinking": {"type": "disabled"}}):
        told = ask(caller, model="ensemble", **fields).usage
        again = ask(caller, model="ensemble", **fields).usage
        counted = caller("count_tokens", model="ensemble", **fields).input_tokens
        for usage in (told, again):
            assert usage.input_tokens + usage.cache_read_input_tokens == counted
            assert usage.cache_creation_input_tokens == 0
        assert again.cache_read_input_tokens >= counted - 20 > 0


def test_the_stop_sequence_that_came_is_told(client: Caller) -> None:
    [block] = ask(client, max_tokens=30).content
    stop = block.text[8:10]
    expected = block.text[: block.text.index(stop)]
    for answer in (
        ask(client, max_tokens=30, stop_sequences=["\N{SNOWMAN}", stop]),
        ask(client.streamed, max_tokens=30, stop_sequences=["\N{SNOWMAN}", stop]),
    ):
        assert [each.text for each in answer.content] == [expected]
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_may_fill_the_context(client: Caller) -> None:
    form = {"type": "array", "items": {"type": "boolean"}, "minItems": 2 * MAX_MODEL_LEN}
    config = {"format": {"type": "json_schema", "schema": form}}
    for max_tokens in (MAX_MODEL_LEN - 1, 20_000):
        answer = ask(client, max_tokens=max_tokens, output_config=config)
        assert answer.stop_reason == "model_context_window_exceeded"
        usage = answer.usage
        total = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
        assert total == MAX_MODEL_LEN


def test_structured_output(client: Caller) -> None:
    config = {
        "format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}},
        "effort": "high",
    }
    answer = ask(client, output_config=config)
    assert json.loads(answer.content[0].text) in ("yes", "no")
    assert answer.stop_reason == "end_turn"
    assert comparable(ask(client.streamed, output_config=config)) == comparable(answer)


def test_a_conversation_with_tools(caller: Caller, tool_tokenizer: Any) -> None:
    """Two turns: the model calls, gets what the tools gave back, and is asked again."""
    asked: dict[str, Any] = {"model": "ensemble", "tools": TOOLS, "max_tokens": 300}
    must = {"type": "any", "disable_parallel_tool_use": True}
    first = ask(caller, **asked, messages=[RAIN], tool_choice=must)
    assert (first.stop_reason, len(first.content)) == ("tool_use", 1)
    [call] = first.content
    Draft202012Validator(SCHEMAS[call.name]).validate(call.input)
    streamed = ask(caller.streamed, **asked, messages=[RAIN], tool_choice=must)
    assert comparable(streamed) == comparable(first)

    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"dry": false}'}
    turns = [RAIN, first.to_param(), {"role": "user", "content": [result]}]
    named = {"type": "tool", "name": "get_weather"}
    second = ask(caller, **asked, messages=turns, tool_choice=named, system="Be brief.")
    assert [block.name for block in second.content] == ["get_weather"]
    functions = [
        {
            "type": "function",
            "function": {"name": name, "parameters": schema, "description": "d"},
        }
        for name, schema in SCHEMAS.items()
    ]
    called = {"id": call.id, "function": {"name": call.name, "arguments": call.input}}
    rendered = tool_tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            RAIN,
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "content": '{"dry": false}'},
        ],
        tools=functions,
        tokenize=False,
        add_generation_prompt=True,
    )
    usage = second.usage
    length = len(tool_tokenizer.encode(rendered, add_special_tokens=False))
    assert usage.input_tokens + usage.cache_read_input_tokens == length
    none = ask(caller, **asked, messages=turns, tool_choice={"type": "none"})
    assert none.usage.input_tokens + none.usage.cache_read_input_tokens < length


def test_a_call_that_was_cut_off_ends_with_max_tokens(caller: Caller) -> None:
    asked: dict[str, Any] = {"model": "ensemble", "messages": [RAIN], "tools": TOOLS}
    asked |= {"max_tokens": 45, "tool_choice": {"type": "tool", "name": "get_weather"}}
    answer, streamed = ask(caller, **asked), ask(caller.streamed, **asked)
    assert (answer.stop_reason, answer.content[0].name) == ("max_tokens", "get_weather")
    assert answer.content[0].input == streamed.content[0].input
    assert comparable(streamed) == comparable(answer)


def test_a_stream_that_omits_thinking_says_that_it_lives(
    tool_gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.gateway.anthropic.serving._QUIET_S", 0.0)
    begun = [RAIN, {"role": "assistant", "content": "<think>"}]
    asked: dict[str, Any] = {"model": "ensemble", "messages": begun, "max_tokens": 40}
    asked |= {"stream": True, "thinking": {"type": "adaptive", "display": "omitted"}}
    reply = post(tool_gateway, "POST", "/v1/messages", asked)
    assert reply.status == 200
    assert reply.body.count(b"event: ping\n") > 2
    assert b"thinking_delta" not in reply.body


def test_thinking_is_a_block_of_its_own(caller: Caller) -> None:
    """The words that are put into the model's mouth open it."""
    begun = [RAIN, {"role": "assistant", "content": "<think>"}]
    asked: dict[str, Any] = {"model": "ensemble", "messages": begun, "max_tokens": 40}
    asked["thinking"] = {"type": "adaptive"}
    answer, streamed = ask(caller, **asked), ask(caller.streamed, **asked)
    thought = answer.content[0]
    assert (thought.type, bool(thought.thinking), len(thought.signature)) == ("thinking", True, 44)
    assert 0 < answer.usage.output_tokens_details.thinking_tokens <= answer.usage.output_tokens
    assert comparable(streamed) == comparable(answer)
    asked["thinking"] |= {"display": "omitted"}
    omitted, streamed = ask(caller, **asked), ask(caller.streamed, **asked)
    assert comparable(streamed) == comparable(omitted)
    assert omitted.content[0].thinking == ""
    assert comparable(omitted)["content"][1:] == comparable(answer)["content"][1:]

    def length(*said: Any, **fields: Any) -> int:
        turns = [RAIN, {"role": "assistant", "content": [*said, {"type": "text", "text": "a"}]}]
        found = caller("count_tokens", model="ensemble", messages=[*turns, RAIN], **fields)
        assert isinstance(found.input_tokens, int)
        return found.input_tokens

    redacted = {"type": "redacted_thinking", "data": "?"}
    assert length(thought) > length() == length(redacted)  # it is taken back
    assert length(omitted.content[0]) == length(thought)
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert length(thinking={"type": "disabled"}) > length(thinking=enabled) == length()


ENABLED = {"type": "enabled", "budget_tokens": 1499}
ONE_TOOL = [{"name": "f", "input_schema": {"type": "object"}}]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens: must be at least 1 (got 0)"),
    *(
        (
            {"messages": [{"role": "user", "content": "x" * length}]},
            f" tokens > {MAX_MODEL_LEN} maximum",
        )
        for length in (600, 60_000)
    ),
    ({"stop_sequences": ["a"] * 300}, "stop_sequences: must have at most 256"),
    ({"thinking": ENABLED, "max_tokens": 1500}, "thinking.type: enabled is not supported"),
    ({"tools": ONE_TOOL}, "tools: not supported by this model"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: any needs tools"),
    ({"tools": ONE_TOOL, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name: 'g'"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        'output_config.format.schema: #: keyword "not" is not enforced; leave it out',
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "text"), REFUSED)
def test_what_is_wrong_is_refused_by_name(
    gateway: str, fields: dict[str, Any], text: str, stream: bool
) -> None:
    with (
        Anthropic(base_url=f"http://{gateway}", api_key="none", max_retries=0) as client,
        pytest.raises(BadRequestError) as caught,
    ):
        ask(client.messages.create, stream=stream, **fields)
    error: Any = caught.value.body
    message = error["error"]["message"]
    assert text in message
    assert message.startswith("prompt is too long: ") == message.endswith(" maximum")
    assert error["request_id"] == caught.value.request_id
