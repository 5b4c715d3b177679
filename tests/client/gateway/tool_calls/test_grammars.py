"""What a grammar lets a random model write is read as calls, in the form of each family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from client.gateway.tool_calls import FORMATS, ToolChoice
from client.protocol import Section
from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.vocabulary import Vocabulary
from engine.text.section_tags import TOOL_CALLS
from tests.client.gateway.tool_calls.answers import Answer
from tests.client.gateway.tool_calls.answers import read as read_sections
from tests.engine.text.test_section_families import encode, read
from tests.factories.grammars import RandomWriter, spec
from tests.factories.tagged import Form, format_of, tagged

TAGS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "llama4_pythonic": ("<|python_start|>", "<|python_end|>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "openai": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"),
    "pythonic": ("<|python_tag|>",),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
}
FLAG = {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}
WEATHER = {
    "type": "object",
    "properties": {
        "at": {"$ref": "#/$defs/place"},
        "city": {"enum": ["Rome", "Zürich"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "dry": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": FLAG},
}
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "f_1": FLAG, "now": {}}
SCHEMAS["now"] = {"type": "object", "additionalProperties": False}


def tools(*, strict: bool = False) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


class Model:
    """A random model with the tags of a family."""

    def __init__(self, name: str, form: Form) -> None:
        self.form = FORMATS[name]
        self._name = name
        self._detokenizer = tagged(TAGS[name], form)
        tokenizer = self._detokenizer.tokenizer
        assert tokenizer.eos_token_id is not None
        vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
        self.compiler = GrammarCompiler(vocabulary)
        self._writer = RandomWriter(tokenizer, vocabulary)

    def compiled(self, structure: Any) -> Any:
        return self.compiler.compile(spec(structural_tag={"format": structure})).result()

    def allows(self, choice: ToolChoice, text: str) -> bool:
        """Tell whether the answer may begin with `text`."""
        return self.permits(choice.structure(self.form), text)

    def permits(self, structure: Any, text: str) -> bool:
        """Tell whether what follows `structure` may begin with `text`."""
        matcher = self.compiled(structure).deep_copy()
        return all(map(matcher.consume_token, encode(self._detokenizer, text)))

    def write(self, choice: ToolChoice, seed: int) -> str:
        """Return a whole answer as the model writes it."""
        text = self._writer.write(self.compiled(choice.structure(self.form)), seed)
        assert text is not None
        return text

    def answer(self, choice: ToolChoice, text: str) -> Answer:
        """Return what a client gets of that."""
        found = read(self._detokenizer, text, format_of(self._detokenizer, "none", self._name))
        sections = [Section(each.type, each.index, each.text, each.tag) for each in found]
        return read_sections(self.form, [sections], functions=choice.functions)


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
        twice = f"{text}{model.form.separator}{text}"
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
    either = ToolChoice.read(tools(), "auto", False).structure(model.form, answer)
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
    assert model.allows(auto, f"Hello {good}")
    assert model.allows(auto, f"Hello {bad}") == (not model.form.trigger)
    alike = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "now"}],
    }
    assert ToolChoice.read(tools(), alike) == ToolChoice.read(tools(), allowed("now"))


def test_strict_functions_bind_the_calls_of_a_free_answer(model: Model) -> None:
    choice = ToolChoice.read(tools(strict=True))
    call = model.write(ToolChoice.read(tools(), "required", False), 0)
    assert model.allows(choice, f"Hello {{[<tool {call}, {call}.")
    assert not model.allows(ToolChoice.read(tools(), "auto", False), f"Hello {call}, {call}.")
    for name in SCHEMAS:
        begin = call[: call.index(name)] if name in call else None
        if begin is not None and model.form.trigger:
            assert not model.allows(choice, f"{begin}get_cheese")
    begin = str(model.form.call(choice.functions["get_weather"])["begin"])
    assert not model.allows(choice, f"{begin} x")


def test_only_what_has_to_be_is_enforced() -> None:
    form = FORMATS["hermes"]
    assert ToolChoice.read(tools()).structure(form) is None
    assert ToolChoice.read(tools(strict=True), "none").structure(form) is None
    assert ToolChoice.read(None).structure(form) is None
    # As OpenAI's clients send it that have no tools this time.
    assert ToolChoice.read([], "auto") == ToolChoice.read([])
    assert ToolChoice.read(tools(), "auto", False).structure(form) is not None


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
    place = r"tools\[0\].function.parameters.properties.x"
    with pytest.raises(ValueError, match=rf'^{place}: keyword "pattern" is not enforced'):
        ToolChoice.read(asked).structure(FORMATS["qwen3_coder"])
    assert ToolChoice.read(asked).structure(FORMATS["hermes"]) is not None


def test_all_formats_are_names_of_the_server() -> None:
    assert FORMATS.keys() <= TOOL_CALLS.keys()
