"""Arguments that are written one by one follow the schema of all of them, or it is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from client.gateway.tool_parsers import TOOL_PARSERS, Function, ToolChoice
from tests.client.gateway.tool_parsers.answers import read, tool_call
from tests.client.gateway.tool_parsers.random_model import Model

NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
    },
    "required": ["value", "children"],
    "additionalProperties": False,
}
PARAM = r"^tools\[0\]\.function\.parameters"


def choice(parameters: dict[str, Any], *, strict: bool) -> ToolChoice:
    function = {"name": "f", "parameters": parameters, "strict": strict}
    return ToolChoice.read([{"type": "function", "function": function}], "required", False)


def written(name: str, **arguments: str) -> str:
    if name == "pythonic":
        return f"[f({', '.join(f'{key}={value}' for key, value in arguments.items())})]"
    parts = "".join(f"\n<parameter={k}>\n{v}\n</parameter>" for k, v in arguments.items())
    return f"<tool_call>\n<function=f>{parts}\n</function>\n</tool_call>"


@pytest.fixture(params=["qwen3_coder", "pythonic"], scope="module")
def form(request: pytest.FixtureRequest) -> Iterator[tuple[str, Model]]:
    model = Model(request.param, "special")
    yield request.param, model
    model.compiler.close()


def permits(
    form: tuple[str, Model], parameters: dict[str, Any], strict: bool, **given: str
) -> bool:
    name, model = form
    return model.allows(choice(parameters, strict=strict), written(name, **given))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}, "title": "f"},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/Node"}, "Node": NODE}},
        {
            **NODE,
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#"}},
            },
        },
        {
            **NODE,
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/properties/child"}},
                "child": {**NODE, "properties": {"value": {}, "children": {}}},
            },
        },
    ],
)
def test_references_to_objects_of_arguments(
    form: tuple[str, Model], parameters: dict[str, Any], strict: bool
) -> None:
    good = '[{"value": 2, "children": []}]'
    assert permits(form, parameters, strict, value="1", children=good)
    assert not permits(form, parameters, strict, value="1", children="[[]]")
    assert not permits(form, parameters, strict, value='"a"', children="[]")
    assert not permits(form, parameters, strict)


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
@pytest.mark.parametrize(
    ("parameters", "keyword"),
    [
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "anyOf"),
        ({"allOf": [{"required": ["a"]}]}, "allOf"),
        ({"minProperties": 1}, "minProperties"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"not": {"required": ["a"]}}, "not"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"minProperties": 1}}}, "minProperties"),
        ({"$ref": "http://example.com/s"}, "$ref"),
    ],
)
def test_what_is_about_all_arguments_together_is_refused_by_name(
    name: str, parameters: dict[str, Any], keyword: str
) -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, **parameters}
    fault = re.escape(f'keyword "{keyword}" is not enforced')
    with pytest.raises(ValueError, match=f"{PARAM}: {fault}"):
        choice(schema, strict=True).structure(TOOL_PARSERS[name])
    assert choice(schema, strict=False).structure(TOOL_PARSERS[name]) is not None


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_required_is_an_argument(form: tuple[str, Model], strict: bool) -> None:
    schema = {"required": ["z"], "additionalProperties": {"type": "integer"}}
    assert permits(form, schema, strict, z="3")
    assert not permits(form, schema, strict, z='"a"')
    assert not permits(form, schema, strict)


def test_the_arguments_of_alternatives_may_be_given(form: tuple[str, Model]) -> None:
    def variant(kind: str, **others: Any) -> dict[str, Any]:
        return {"properties": {"kind": {"const": kind}, **others}, "required": [*others]}

    schema = {
        "allOf": [{"properties": {"n": {"type": "integer"}}, "required": ["n"]}],
        "oneOf": [variant("a", x={"type": "integer"}), variant("b")],
    }
    kind = "b" if form[0] == "qwen3_coder" else '"b"'
    assert permits(form, schema, False, n="1", kind=kind)
    assert permits(form, schema, False, n="1", x="2")
    assert not permits(form, schema, False, kind=kind)


def test_types_are_those_behind_the_reference() -> None:
    parameters = {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"n": {"type": "integer"}}}}}
    section = tool_call(written("qwen3_coder", n="3").split("<tool_call>")[1].split("</tool")[0])
    functions = {"f": Function("f", parameters)}
    [(_, arguments)] = read(TOOL_PARSERS["qwen3_coder"], [[section]], functions=functions).calls
    assert json.loads(arguments) == {"n": 3}


@pytest.mark.parametrize("name", ["$defs", "definitions"])
def test_texts_beside_definitions_are_enforced(name: str) -> None:
    parameters = {"properties": {"x": {"type": "string"}}, name: {"A": {"type": "integer"}}}
    assert choice(parameters, strict=True).structure(TOOL_PARSERS["qwen3_coder"]) is not None


@pytest.mark.parametrize(
    "parameters",
    [
        {"required": True},
        {"required": [{}, 1]},
        {"$defs": [1], "definitions": 3},
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": [1], "anyOf": 5}}},
        {"$ref": "#"},
        {"$ref": "#/anyOf/3", "anyOf": [1]},
        {"properties": {"a": json.loads('{"items":' * 400 + '{"$ref": "#"}' + "}" * 400)}},
    ],
)
def test_wrong_schemas_are_left_to_the_server(parameters: dict[str, Any]) -> None:
    for name in ("qwen3_coder", "pythonic"):
        assert choice(parameters, strict=False).structure(TOOL_PARSERS[name]) is not None


def test_references_that_double_take_no_time() -> None:
    definitions = {
        f"n{i}": {"allOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 2, "properties": {f"p{i}": {}}}
        for i in range(40)
    }
    function = Function("f", {"$ref": "#/$defs/n0", "$defs": definitions})
    assert len(function.declared) == 40


def test_calls_that_begin_late_are_enforced_too() -> None:
    model = Model("qwen3_coder", "special")
    parameters = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    function = {"name": "f", "parameters": parameters, "strict": True}
    asked = ToolChoice.read([{"type": "function", "function": function}], "auto", False)
    good, bad = (written("qwen3_coder", n=value) for value in ("1", '"a"'))
    try:
        for text in (good, f"Hm. {good}", "a <func b"):
            assert model.allows(asked, text)
            assert model.allows(asked, text.removeprefix("<tool_call>\n"))
        for text in (bad, f"{good} {good}", good.replace("=f>", "=g>")):
            assert not model.allows(asked, text)
            assert not model.allows(asked, "Hm. " + text.replace("<tool_call>\n", ""))
    finally:
        model.compiler.close()
