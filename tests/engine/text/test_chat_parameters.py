"""What a request tells the chat template beside its messages."""

import json
import time
from typing import Any

import pytest

from engine.errors import RequestError, UnsupportedError
from engine.text.chat_parameters import ChatParameters, reasoning_switches
from engine.text.chat_template import render_text
from engine.text.tokenizer import Tokenizer
from engine.validation.limits import MAX_TOOLS
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
        ({"tools": [TOOL, TOOL]}, r"tools\[1\]\.function\.name: 'f' occurs twice"),
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
            "continue_final_message: cannot be",
        ),
        ({"chat_template_kwargs": []}, "chat_template_kwargs: must be an object"),
        ({"chat_template_kwargs": {"tokenize": 1}}, r"chat_template_kwargs\.tokenize: must be"),
    ],
)
def test_wrong_parameters_are_refused_by_name(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=f"^{text}"):
        parse(**fields)


def tools_named(number: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(number)]


def test_tools_are_limited_in_number() -> None:
    assert len(parse(tools=tools_named(MAX_TOOLS)).tools) == MAX_TOOLS
    fault = rf"^tools: has {MAX_TOOLS + 1} tools; at most {MAX_TOOLS} are allowed$"
    with pytest.raises(RequestError, match=fault):
        parse(tools=tools_named(MAX_TOOLS + 1))


def test_cost_of_tools_grows_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.text.chat_parameters.MAX_TOOLS", 2**20)

    def cost(number: int) -> float:
        given = {"tools": tools_named(number)}
        started = time.process_time()
        ChatParameters.of(given)
        return time.process_time() - started

    short, long = (min(cost(number) for _ in range(2)) for number in (1_000, 16_000))
    assert long < 64 * short  # linear work takes 16 times as long, quadratic work 256 times


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


# What published templates read of tools, each failing where it is missing.
GPT_OSS = (
    "{% for t in tools %}// {{ '' + t.function.description }}\ntype {{ t.function.name }} = "
    "{% for name, p in (t.function.parameters.properties or {}).items() %}{{ name }}"
    "{% if p.enum and p.default is defined %} // default: {{ '' + p.default }}{% endif %}"
    "{% endfor %}\n{% endfor %}"
)
SEED_OSS = (
    "{% for t in tools %}def {{ t.function.name }}("
    "{% for name, p in t.function.parameters.properties.items() %}{{ name }}: {{ p.type }}"
    "{% endfor %})\n{% endfor %}"
)
COMMAND_R7B = (
    "{% for t in tools %}{{ t.function.name }} {{ t.function.description }} "
    "{{ t.function.parameters | tojson }}\n{% endfor %}"
)
HERMES = (
    "{% macro of(type) %}{% if type in ['integer', 'string', 'object', 'array'] %}{{ type }}"
    "{% elif type is iterable %}Union[{% for each in type %}{{ of(each) }},{% endfor %}]"
    "{% else %}Any{% endif %}{% endmacro %}"
    "{% for t in tools %}{{ t.function.name + ' - ' + t.function.description }}("
    "{% for name, p in t.function.parameters.properties | items %}{{ name }}: {{ of(p.type) }} "
    "{{ p.description | trim }}{% endfor %}) {{ t.function.parameters | tojson }}\n{% endfor %}"
)
COMMAND_R = (
    "{% macro of(p) %}{% if p.type == 'object' %}Dict[{{ '' + (p.additionalProperties | string) }}]"
    "{% if p.additionalProperties is not defined %}{{ p.additionalProperties.type }}{% endif %}"
    "{% else %}{{ p.type }}{% endif %}{% endmacro %}"
    "{% for t in tools %}{{ t.function.name + t.function.description }}("
    "{% for name, p in t.function.parameters.properties.items() %}{{ name }}: {{ of(p) }} "
    "{{ '' + p.description }}{% endfor %})\n{% endfor %}"
)
TAKING_TOOLS = {
    "gpt-oss": GPT_OSS,
    "Seed-OSS": SEED_OSS,
    "Command R7B": COMMAND_R7B,
    "Hermes": HERMES,
    "Command R": COMMAND_R,
}


def taking_tools(template: str) -> Tokenizer:
    hf_tokenizer = byte_level_tokenizer()
    hf_tokenizer.chat_template = template + CHAT_TEMPLATE
    return Tokenizer(hf_tokenizer)


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def parameters(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


FULL = function(
    "full",
    description="All there is.",
    parameters=parameters(x={"type": "integer", "description": "one"}),
)


@pytest.mark.parametrize("model", TAKING_TOOLS)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"description": "d"},
        {"parameters": parameters(x={"type": "integer"})},
        {"parameters": {}},
        {"description": "d", "parameters": {"type": "object"}},
        {"description": "d", "parameters": {"properties": {"x": {"type": "integer"}}}},
        {"parameters": parameters(x={"type": ["integer", "null"]}, y=True, z={})},
        {"parameters": parameters(x={"type": "object"}, y={"enum": [1, 2], "default": 1})},
        {"parameters": parameters(x={"type": "array", "items": {"type": ["string", "null"]}})},
    ],
)
def test_tools_with_little_said_are_rendered(model: str, given: dict[str, Any]) -> None:
    tools = parse(tools=[FULL, function("bare", **given)])
    prompt = render_text(taking_tools(TAKING_TOOLS[model]), [USER], tools)
    assert "full" in prompt
    assert "bare" in prompt
    assert given.get("description", "") in prompt


def test_neutral_fields_of_tools_are_those_of_a_tool_that_says_nothing() -> None:
    tokenizer = taking_tools(COMMAND_R7B)
    bare, neutral = (
        render_text(tokenizer, [USER], parse(tools=[tool]))
        for tool in (function("f"), function("f", description="", parameters=parameters()))
    )
    assert bare == neutral
    assert bare.startswith('f  {"type": "object", "properties": {}}\n')


def test_tools_that_a_template_renders_stay_as_they_are(tokenizer: Tokenizer) -> None:
    bare = function("f", parameters={"x": {"type": ["integer", "null"]}})
    prompt = render_text(tokenizer, [USER], parse(tools=[bare]))
    assert json.loads(prompt.partition("<|user|>")[0]) == [bare]


@pytest.mark.parametrize("index", [0, 2, 4])
def test_tool_that_a_template_cannot_render_is_named(index: int) -> None:
    wrong = function("wrong", parameters=parameters(x={"type": "null", "enum": 5}))
    others = [function(f"f{i}") for i in range(4)]
    tokenizer = taking_tools(GPT_OSS.replace("p.enum", "(p.enum or []) | list"))
    with pytest.raises(RequestError, match=rf"^tools\[{index}\]: the chat template cannot render"):
        render_text(tokenizer, [USER], parse(tools=[*others[:index], wrong, *others[index:]]))


def test_templates_that_render_no_tool_blame_the_tools() -> None:
    tokenizer = taking_tools("{% if tools %}{{ raise_exception('No tools') }}{% endif %}")
    with pytest.raises(
        RequestError, match=r"^tools: the chat template cannot render tools: .*No tools$"
    ):
        render_text(tokenizer, [USER], parse(tools=[FULL]))


def test_message_that_a_template_refuses_is_blamed_beside_any_tool() -> None:
    banned = {"role": "banned", "content": "x"}
    for tool in (FULL, function("bare")):
        with pytest.raises(RequestError, match=r"^messages: .*No banned role, please$"):
            render_text(taking_tools(GPT_OSS), [banned], parse(tools=[tool]))


def test_variable_that_a_template_cannot_render_is_named() -> None:
    tokenizer = taking_tools("{{ 'Reasoning: ' + (reasoning_effort or 'low') }}")
    given = parse(chat_template_kwargs={"reasoning_effort": 5})
    with pytest.raises(RequestError, match=r"^chat_template_kwargs\.reasoning_effort: the chat"):
        render_text(tokenizer, [USER], given)


@pytest.mark.parametrize("depth", [50, 400])
def test_deep_schema_is_refused_by_name(depth: int) -> None:
    schema: dict[str, Any] = {"type": ["integer", "null"]}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    given = ChatParameters.of({"tools": [function("f", parameters=parameters(x=schema))]})
    tokenizer = taking_tools(
        "{% for x in tools[0].function.parameters.properties.values() %}{{ x.y.z }}{% endfor %}"
    )
    with pytest.raises(RequestError, match=r"^tools\[0\]: "):
        render_text(tokenizer, [USER], given)
