"""Tools and reasoning through a real server, with OpenAI's own clients.

The model is random: a grammar makes it call, or write a text of ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai import BadRequestError, OpenAI

from tests.client.gateway.asking import ask
from tests.server.gateway.tools import CALL, SCHEMAS, TAGS, TOOLS, USER, written

pytestmark = pytest.mark.server

NAMED = {"type": "function", "function": {"name": "get_weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
UNENFORCED = {"name": "f", "strict": True, "parameters": {"not": {}}}


@pytest.fixture(scope="module")
def openai(tool_gateway: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{tool_gateway}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(openai: OpenAI, **options: Any) -> Any:
    extra = {name: options.pop(name) for name in ("structured_outputs",) if name in options}
    asked = {"model": "ensemble", "messages": [USER], "tools": TOOLS, "max_tokens": 300}
    return openai.chat.completions.create(**{**asked, **options}, extra_body=extra)


def whole(chunks: Any) -> dict[str, Any]:
    """Put a stream together as strict clients do: the message, and its finish reason."""
    made: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for chunk in chunks:
        [choice] = chunk.choices
        delta = choice.delta
        made["content"] += delta.content or ""
        made["reasoning"] += getattr(delta, "reasoning_content", None) or ""
        assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
        for call in delta.tool_calls or ():
            if call.index == len(made["calls"]):
                assert (call.type, bool(call.id)) == ("function", True)
                made["calls"].append([call.function.name, ""])
            assert call.index == len(made["calls"]) - 1
            made["calls"][call.index][1] += call.function.arguments
        assert "finish_reason" not in made
        if choice.finish_reason is not None:
            made["finish_reason"] = choice.finish_reason
    return made


def told(answer: Any) -> dict[str, Any]:
    """Return an answer that came at once in the same form."""
    [choice] = answer.choices
    message = choice.message
    reasoning = getattr(message, "reasoning_content", None)
    assert getattr(message, "reasoning", None) == reasoning
    calls = message.tool_calls or []
    assert all(call.id and call.type == "function" for call in calls)
    assert message.content or calls
    return {
        "content": message.content or "",
        "reasoning": reasoning or "",
        "calls": [[call.function.name, call.function.arguments] for call in calls],
        "finish_reason": choice.finish_reason,
    }


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": NAMED},
        {"tool_choice": ALLOWED, "parallel_tool_calls": False},
    ],
    ids=["required", "one", "named", "allowed"],
)
def test_calls_that_have_to_be_are_enforced(
    openai: OpenAI, options: Any, seed: int, blanks: Any
) -> None:
    asked = {**options, "seed": seed, "temperature": 1.5, "logit_bias": blanks}
    answer = told(create(openai, **asked))
    assert answer["finish_reason"] == "tool_calls"
    assert answer["content"] == ""
    for name, arguments in answer["calls"]:
        Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))
    if options != {"tool_choice": "required"}:
        assert len(answer["calls"]) == 1
    if options["tool_choice"] in (NAMED, ALLOWED):
        assert answer["calls"][0][0] == "get_weather"
    assert whole(create(openai, stream=True, **asked)) == answer


def test_a_call_among_reasoning_and_an_answer(openai: OpenAI, tool_tokenizer: Any) -> None:
    text = f"\nhm\n</think>\n\nLet me see.\n<tool_call>\n{CALL}\n</tool_call>"
    expected = {
        "content": "Let me see.",
        "reasoning": "hm",
        "calls": [["get_weather", '{"city": "Zürich", "dry": true}']],
        "finish_reason": "tool_calls",
    }
    begin = str(tool_tokenizer.convert_tokens_to_ids("<think>"))
    grammar = {**written(text), "begin_after": "<think>"}
    asked: Any = {"structured_outputs": grammar, "logit_bias": {begin: 100}}
    answer = create(openai, **asked)
    assert told(answer) == expected
    thought = tool_tokenizer.encode("<think>\nhm\n", add_special_tokens=False)
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought)
    assert whole(create(openai, stream=True, **asked)) == expected
    plain = {**expected, "calls": [], "finish_reason": "stop"}
    plain["content"] = f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>"
    for no_tools in ({"tool_choice": "none"}, {"tools": None}):
        assert told(create(openai, **asked, **no_tools)) == plain
        assert whole(create(openai, stream=True, **asked, **no_tools)) == plain


def test_a_call_that_was_cut_off_ends_with_length(openai: OpenAI) -> None:
    text = f"<tool_call>\n{CALL}\n</tool_call>"
    asked: Any = {"structured_outputs": written(text), "max_tokens": 56}
    answer = told(create(openai, **asked))
    [[name, arguments]] = answer["calls"]
    assert name == "get_weather"
    assert '{"city": "Zürich", "dry": true}'.startswith(arguments)
    assert answer["finish_reason"] == "length"
    assert whole(create(openai, stream=True, **asked)) == answer


def test_strict_functions_are_enforced_where_the_model_is_free(
    openai: OpenAI, tool_tokenizer: Any
) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    # Nothing but calls, as far as the grammar lets it.
    begin = str(tool_tokenizer.convert_tokens_to_ids("<tool_call>"))
    answer = told(create(openai, tools=strict, logit_bias={begin: 100}, temperature=1.5, seed=1))
    assert len(answer["calls"]) > 1
    for name, arguments in answer["calls"][:-1]:
        Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))


def test_json_is_asked_for_beside_tools(openai: OpenAI, blanks: Any, tool_tokenizer: Any) -> None:
    schema = {"name": "x", "schema": {"enum": ["yes", "no"]}}
    asked: Any = {"response_format": {"type": "json_schema", "json_schema": schema}}
    begin = str(tool_tokenizer.convert_tokens_to_ids("<tool_call>"))
    for weight, is_called in ((100, True), (-100, False)):
        bias = {**blanks, begin: weight}
        answer = told(create(openai, parallel_tool_calls=False, logit_bias=bias, seed=5, **asked))
        assert bool(answer["calls"]) == is_called
        assert answer["content"] in (("",) if is_called else ('"yes"', '"no"'))


@pytest.mark.parametrize("thinks", [True, False])
def test_what_is_enforced_comes_after_reasoning(
    openai: OpenAI, blanks: Any, tool_tokenizer: Any, thinks: bool
) -> None:
    start, end = (str(tool_tokenizer.convert_tokens_to_ids(tag)) for tag in TAGS[:2])
    bias = {**blanks, start: 50 if thinks else -100, end: 100}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
    for asked in ({"tools": None, "response_format": schema}, {"tool_choice": "required"}):
        answer = create(openai, logit_bias=bias, logprobs=True, **asked)
        tokens = [each.token for each in answer.choices[0].logprobs.content]
        assert (tokens[:2] == list(TAGS[:2])) == thinks
        assert answer.choices[0].message.content == (None if "tool_choice" in asked else '"yes"')
        assert bool(answer.choices[0].message.tool_calls) == ("tool_choice" in asked)


def test_a_conversation_goes_back_into_the_template(openai: OpenAI, tool_tokenizer: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather"}}
    call["function"] |= {"arguments": '{"city": "Rome"}'}  # type: ignore[operator]
    said: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": '{"dry": false}'}
    asked: Any = {"max_tokens": 1}

    def length(name: str | None) -> int:
        thought = {} if name is None else {name: "hm"}
        messages = [USER, {**said, **thought}, result]
        tokens = create(openai, messages=messages, **asked).usage.prompt_tokens
        assert isinstance(tokens, int)
        return tokens

    inner = {**call, "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    plain = {"role": "assistant", "content": "", "tool_calls": [inner]}
    for name in (None, "reasoning", "reasoning_content"):
        thought = {} if name is None else {"reasoning_content": "hm"}
        rendered = tool_tokenizer.apply_chat_template(
            [USER, {**plain, **thought}, result],
            tools=TOOLS,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert length(name) == len(tool_tokenizer.encode(rendered, add_special_tokens=False))


@pytest.mark.parametrize(
    "arguments", ['{"city": "Zü', '{"city": "a\nb"}', '{"city": "\\d"}', "print(1)"]
)
def test_broken_arguments_go_back_as_the_model_wrote_them(
    openai: OpenAI, tool_gateway: str, tool_tokenizer: Any, arguments: str
) -> None:
    function = {"name": "get_weather", "arguments": arguments}
    call: Any = {"id": "call_1", "type": "function", "function": function}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "dry"}
    inner = {**call, "function": {**function, "arguments": {"a mark": ""}}}
    rendered = tool_tokenizer.apply_chat_template(
        [USER, {**said, "tool_calls": [inner]}, result],
        tools=TOOLS,
        tokenize=False,
        add_generation_prompt=True,
    ).replace('{"a mark": ""}', arguments)
    length = len(tool_tokenizer.encode(rendered, add_special_tokens=False))
    chat = create(openai, messages=[USER, said, result], max_tokens=1)
    assert chat.usage.prompt_tokens == length
    items = [
        {"role": "user", "content": USER["content"]},
        {"type": "function_call", "call_id": "call_1", **function},
        {"type": "function_call_output", "call_id": "call_1", "output": "dry"},
    ]
    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response = openai.responses.create(
        model="ensemble",
        input=items,
        tools=functions,
        max_output_tokens=1,  # type: ignore[arg-type]
    )
    assert response.usage is not None
    assert response.usage.input_tokens == length
    use = {"type": "tool_use", "id": "call_1", "name": "get_weather"}
    for given in (arguments, {"INVALID_JSON": arguments}):
        turns = [
            {**USER},
            {"role": "assistant", "content": [{**use, "input": given}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "dry"}],
            },
        ]
        tools = [
            {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
            for tool in TOOLS
        ]
        body = {"model": "ensemble", "messages": turns, "tools": tools}
        reply = ask(tool_gateway, "POST", "/v1/messages/count_tokens", body)
        assert json.loads(reply.body) == {"input_tokens": length}


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
            "is not one of the tools",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "string"),
        ({"tools": [{"type": "x", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
        ({"tools": TOOLS + TOOLS[:1]}, "tools[2].function.name", "occurs twice"),
        (
            {"tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "not supported with tools",
        ),
        (
            {"tools": [{"type": "function", "function": UNENFORCED}]},
            "tools[0].function.parameters",
            'tools[0].function.parameters: #: keyword "not" is not enforced',
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_tools_are_refused_by_name(
    openai: OpenAI, fields: Any, param: str, text: str, stream: bool
) -> None:
    with pytest.raises(BadRequestError) as caught:
        create(openai, stream=stream, **fields)
    assert text in caught.value.message
    assert caught.value.param == param


def test_reasoning_ends_with_its_budget(openai: OpenAI) -> None:
    begun = [USER, {"role": "assistant", "content": "<think>"}]
    asked: dict[str, Any] = {"model": "ensemble", "messages": begun, "max_tokens": 40}
    asked |= {"temperature": 0}
    form = {"continue_final_message": True, "add_generation_prompt": False}
    free, bounded = (
        openai.chat.completions.create(**asked, extra_body={**form, **budget})
        for budget in ({}, {"thinking_token_budget": 7})
    )
    thoughts = [made.choices[0].message.reasoning_content for made in (free, bounded)]
    assert thoughts[0].startswith(thoughts[1])
    assert bounded.choices[0].message.content
    counts = [made.usage.completion_tokens_details.reasoning_tokens for made in (free, bounded)]
    assert 7 <= counts[1] <= 10 < counts[0]


def test_effort_none_switches_thinking_off(openai: OpenAI) -> None:
    """As the variable of the chat template does, which then opens and closes it."""
    asked: dict[str, Any] = {"model": "ensemble", "messages": [USER], "max_tokens": 8}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    expected = openai.chat.completions.create(**asked, extra_body=off)
    none = openai.chat.completions.create(**asked, reasoning_effort="none")
    medium = openai.chat.completions.create(**asked, reasoning_effort="medium")
    assert none.usage.prompt_tokens == expected.usage.prompt_tokens > medium.usage.prompt_tokens
    assert none.choices[0].message == expected.choices[0].message
    by_name = openai.chat.completions.create(**asked, reasoning_effort="medium", extra_body=off)
    assert by_name.usage.prompt_tokens == expected.usage.prompt_tokens
    response = openai.responses.create(
        model="ensemble", input=[USER], max_output_tokens=8, reasoning={"effort": "none"}
    )
    assert response.usage.input_tokens == expected.usage.prompt_tokens
    with pytest.raises(BadRequestError, match="reasoning_effort: only none and medium"):
        openai.chat.completions.create(**asked, reasoning_effort="low")
