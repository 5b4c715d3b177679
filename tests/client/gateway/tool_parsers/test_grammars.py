"""What a grammar lets a random model write is read as calls, in the form of each family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from client.gateway.schemas.limits import MAX_TOOLS
from client.gateway.tool_parsers import TOOL_PARSERS, ToolChoice
from engine.text.output_parsing.tags import TOOL_CALLS
from tests.client.gateway.tool_parsers.random_model import SCHEMAS, TAGS, Model, allowed, tools


@pytest.fixture(
    params=[*((name, "special") for name in TAGS), ("hermes", "text")],
    ids=lambda param: "-".join(param),
    scope="module",
)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    model = Model(*request.param)
    yield model
    model.compiler.close()


def test_required_is_one_call_or_more_and_nothing_else(model: Model) -> None:
    several, one = (ToolChoice.read(tools(), "required", parallel) for parallel in (None, False))
    for seed in range(6):
        text = model.write(one, seed)
        answer = model.answer(one, text)
        assert (answer.content, answer.finish_reason) == ("", "tool_calls")
        [(name, arguments)] = answer.calls
        Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))
        if answer.reasoning:  # here its end also ends a sequence, and is not in the text
            continue
        twice = f"{text}{model.parser.separator}{text}"
        assert model.answer(several, twice) == answer._replace(calls=answer.calls * 2)
        assert model.allows(several, twice)
        assert not model.allows(one, twice)
    assert not model.allows(several, "Hello")
    assert model.answer(several, model.write(several, 0)).calls


def test_gpt_oss_may_think_before_what_is_enforced() -> None:
    model = Model("openai", "special")
    thought = "<|channel|>analysis<|message|>Hm, so.<|end|><|start|>assistant"
    choice = ToolChoice.read(tools(), "required", False)
    answer = {"type": "json_schema", "json_schema": {"const": "no"}, "strict": True}
    either = ToolChoice.read(tools(), "auto", False).structure(model.parser, answer)
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    final = '<|channel|>final<|message|>"no"'
    try:
        for begun in (call, f"{thought}{call}"):
            assert model.allows(choice, begun)
            assert model.answer(choice, begun).calls == [("now", "{}")]
        assert not model.allows(choice, thought + thought)
        assert not model.allows(choice, final)
        for text in (call, final, thought + call, thought + final):
            assert model.permits(either, text)
        assert not model.permits(either, f'{thought}"no"')
    finally:
        model.compiler.close()


def test_a_named_function_is_called_once(model: Model) -> None:
    named = ToolChoice.read(tools(), {"type": "function", "function": {"name": "f_1"}})
    answer = model.answer(named, model.write(named, 0))
    assert [name for name, _ in answer.calls] == ["f_1"]


def test_only_the_allowed_tools_are_called(model: Model) -> None:
    names = ("f_1", "now")
    required = ToolChoice.read(tools(), allowed(*names, mode="required"))
    for seed in range(4):
        answer = model.answer(required, model.write(required, seed))
        assert answer.calls
        assert {name for name, _ in answer.calls} <= set(names)
    # Free text, but no call of another function.
    auto = ToolChoice.read(tools(), allowed(*names))
    good, bad = (
        model.write(ToolChoice.read(tools(), {"type": "function", "name": name}), 0)
        for name in ("now", "get_weather")
    )
    assert model.allows(auto, f"{model.before_calls}{good}")
    assert model.allows(auto, f"{model.before_calls}{bad}") != model.is_bound
    alike = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "now"}],
    }
    assert ToolChoice.read(tools(), alike) == ToolChoice.read(tools(), allowed("now"))


def test_strict_functions_bind_the_calls_of_a_free_answer(model: Model) -> None:
    choice = ToolChoice.read(tools(strict=True))
    call = model.write(ToolChoice.read(tools(), "required", False), 0)
    between = model.parser.separator if model.parser.text else ", "
    twice = f"{model.before_calls}{call}{between}{call}"
    assert model.allows(choice, twice)
    assert not model.allows(ToolChoice.read(tools(), "auto", False), twice)
    for name in SCHEMAS:
        begin = call[: call.index(name)] if name in call else None
        if begin is not None and model.is_bound:
            assert not model.allows(choice, f"{begin}get_cheese")
    begin = str(model.parser.call(choice.functions["get_weather"])["begin"])
    assert not model.allows(choice, f"{begin} x")


def test_only_what_has_to_be_is_enforced() -> None:
    parser = TOOL_PARSERS["hermes"]
    assert ToolChoice.read(tools()).structure(parser) is None
    assert ToolChoice.read(tools(strict=True), "none").structure(parser) is None
    assert ToolChoice.read(None).structure(parser) is None
    # As OpenAI's clients send it that have no tools this time.
    assert ToolChoice.read([], "auto") == ToolChoice.read([])
    assert ToolChoice.read(tools(), "auto", False).structure(parser) is not None


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ((None, "auto"), "tool_choice: auto needs tools"),
        (([], "required"), "tool_choice: required needs tools"),
        (([], allowed("now")), r"tool_choice.allowed_tools.tools\[0\].function.name: 'now' is not"),
        ((tools(), "any"), "tool_choice: must be auto, none, required, "),
        ((tools(), {"type": "any"}), "tool_choice: must be"),
        ((tools(), {"type": "function"}), "tool_choice.name: must be a string"),
        ((tools(), allowed("now", mode="none")), "tool_choice.allowed_tools.mode: must be auto or"),
        ((tools(), allowed()), "tool_choice.allowed_tools.tools: must be a list of functions"),
        (
            (tools(), allowed("now", "g")),
            r"tool_choice.allowed_tools.tools\[1\].function.name: 'g' is not one of the tools",
        ),
        ((tools(), {**allowed("now"), "x": 1}), "tool_choice.x: unknown field"),
        (
            (tools(), {"type": "function", "function": {"name": "g"}}),
            "tool_choice.function.name: 'g' is not one of the tools",
        ),
        (([1],), r"tools\[0\].type: must be 'function'"),
        (([{"type": "function"}],), r"tools\[0\].function: must be an object"),
        (
            ([{"type": "function", "function": {}}],),
            r"tools\[0\].function.name: must be a string",
        ),
        (
            ([{"type": "function", "function": {"name": "f", "parameters": [1]}}],),
            r"tools\[0\].function.parameters: must be an object",
        ),
    ],
)
def test_wrong_choices_are_named(arguments: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=f"^{fault}"):
        ToolChoice.read(*arguments)


def test_what_a_form_cannot_enforce_is_refused() -> None:
    schema = {"properties": {"x": {"type": "string", "pattern": "a"}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    asked = [{"type": "function", "function": function}]
    param = r"tools\[0\].function.parameters.properties.x"
    with pytest.raises(ValueError, match=rf'^{param}: keyword "pattern" is not enforced'):
        ToolChoice.read(asked).structure(TOOL_PARSERS["qwen3_coder"])
    assert ToolChoice.read(asked).structure(TOOL_PARSERS["hermes"]) is not None


def test_tool_choice_of_too_many_tools_is_refused() -> None:
    most = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(MAX_TOOLS)]
    assert len(ToolChoice.read(most).functions) == MAX_TOOLS
    with pytest.raises(ValueError, match=r"^tools: has 1025 tools; at most 1024 are allowed$"):
        ToolChoice.read([*most, most[0]])


def test_server_takes_the_names_of_all_formats_and_no_others() -> None:
    assert TOOL_PARSERS.keys() == TOOL_CALLS.keys()
