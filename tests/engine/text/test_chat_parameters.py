"""What a request tells the chat template beside its messages."""

import json
from typing import Any

import pytest

from engine.errors import RequestError, UnsupportedError
from engine.text.chat_parameters import ChatParameters, reasoning_switches
from engine.text.chat_template import render_text
from engine.text.tokenizer import Tokenizer
from tests.factories.tokenizers import CHAT_TEMPLATE, byte_level_tokenizer

USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
) + CHAT_TEMPLATE


def parse(**fields: Any) -> ChatParameters:
    return ChatParameters.parse(json.dumps(fields))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    hf_tokenizer = byte_level_tokenizer()
    hf_tokenizer.chat_template = TEMPLATE
    return Tokenizer(hf_tokenizer)


def test_nothing_said_is_the_default() -> None:
    absent = parse(tools=None, add_generation_prompt=None, chat_template_kwargs=None)
    assert ChatParameters.parse("") == ChatParameters.parse("{}") == absent == ChatParameters()


def test_tools_and_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    given = parse(tools=[TOOL], chat_template_kwargs={"enable_thinking": False})
    prompt = render_text(tokenizer, [USER], given)
    tools, _, rest = prompt.partition("[False]")
    assert json.loads(tools) == [TOOL]
    assert rest == "<|user|>hi<|end|><|assistant|>"


def test_marks_of_what_to_cache_do_not_reach_it() -> None:
    marked = {**TOOL, "cache_control": {"type": "ephemeral"}}
    assert parse(tools=[TOOL, marked | {"function": {"name": "other"}}]).tools == (
        TOOL,
        {"type": "function", "function": {"name": "other"}},
    )


def test_what_says_nothing_of_a_tool_does_not_reach_it() -> None:
    nothing = {"description": None, "parameters": None, "strict": False, "x": None}
    name = {"name": "f"}
    for more in (nothing, {"strict": None}, {"cache_control": {"type": "ephemeral"}}):
        given = {"type": "function", "function": {**name, **more}, "x": None}
        assert parse(tools=[given]).tools == ({"type": "function", "function": name},)
    said = {"strict": True, "return": {"type": "string"}, "description": ""}
    given = {"type": "function", "function": {**name, **said}}
    assert parse(tools=[given]).tools == (given,)


def test_the_last_message_is_continued(tokenizer: Tokenizer) -> None:
    messages = [USER, {"role": "assistant", "content": "Once upon"}]
    given = parse(continue_final_message=True)
    assert not given.add_generation_prompt
    assert render_text(tokenizer, messages, given).endswith("<|assistant|>Once upon")
    with pytest.raises(RequestError, match=r"^continue_final_message: the last message has no"):
        render_text(
            tokenizer, [USER, {"role": "assistant", "content": "", "tool_calls": []}], given
        )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tools": [TOOL]}, "tools: not supported by this model"),
        ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking: not supported"),
    ],
)
def test_what_the_template_would_leave_out_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        render_text(Tokenizer(byte_level_tokenizer()), [USER], parse(**fields))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"x": 1}, r"chat_parameters\.x: unknown field"),
        ({"chat_template": "{{ 1 }}"}, "chat_template: "),
        ({"documents": []}, "documents: not supported"),
        ({"tools": {}}, "tools: must be a list"),
        ({"tools": [{}]}, r"tools\[0\]\.type: must be 'function'"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]\.function: must be an object"),
        ({"tools": [TOOL, TOOL]}, r"tools\[1\]\.function\.name: 'f' is there twice"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            r"tools\[0\]\.function.name: must be 1 to 128",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]},
            r"tools\[0\]\.function\.parameters: must be an object",
        ),
        ({"add_generation_prompt": 1}, "add_generation_prompt: must be true or false"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message: excludes",
        ),
        ({"chat_template_kwargs": []}, "chat_template_kwargs: must be an object"),
        ({"chat_template_kwargs": {"tokenize": 1}}, r"chat_template_kwargs\.tokenize: is no"),
    ],
)
def test_wrong_parameters_are_refused_by_name(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=f"^{text}"):
        parse(**fields)


@pytest.mark.parametrize("text", ["[]", "{", "{" * 100_000, "1"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"^chat_parameters: "):
        ChatParameters.parse(text)


@pytest.mark.parametrize(
    ("template", "switches"),
    [
        (TEMPLATE, ["enable_thinking"]),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", ["thinking"]),
        ("{{- 'Reasoning: ' + reasoning_effort }}", ["reasoning_effort"]),
        ("{{ m.thinking }}{{ m['thinking'] }} thinking {{ rethinking }}", []),
        ("", []),
    ],
)
def test_variables_that_control_reasoning_are_found(template: str, switches: list[str]) -> None:
    assert reasoning_switches(template) == switches
